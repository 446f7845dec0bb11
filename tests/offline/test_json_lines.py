"""A file of JSON lines that a run adds to: every way in which an earlier run can have left the file."""

import pytest

from specjax.offline.json_lines import JsonLines

ROWS = [{"id": i, "text": "ä\n"} for i in range(3)]
SETTINGS = {"model": "m", "size": 4}


def add_missing(path, settings):
    """What a run does: it adds the rows that are not there. -> how many rows there were."""
    there = []
    lines = JsonLines(path, '{"id": ', there.append, settings)
    assert there == ROWS[: len(there)]
    for row in ROWS[len(there) :]:
        lines.add(row)
    return len(there)


@pytest.mark.parametrize("settings", [None, SETTINGS])
def test_a_run_goes_on_wherever_the_run_before_was_killed(tmp_path, settings):
    path = tmp_path / "out"
    assert add_missing(path, settings) == 0
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        there = add_missing(path, settings)
        assert path.read_bytes() == whole
        assert there == max(0, whole[:cut].count(b"\n") - (settings is not None))


@pytest.mark.parametrize("settings, text, named", [
    (None, "hello", "line 1 is not of this run"),
    (None, '{"id": 1}\nhello\n', 'line 2 is not of this run: hello; expected a line that begins with {"id":;'),
    (None, '{"id": 1\n', "line 1 is damaged: .*; remove the line"),
    (None, '{"id": "\udcff"}\n', "line 1 is damaged: .*; remove the line"),
    (SETTINGS, '{"model": "m", "size": 5}\n{"id": 0}\n', "line 1 is .* give another file, or the settings"),
    (SETTINGS, '{"model": "other', "line 1 is not of this run"),
    (SETTINGS, '{"id": 0}\n', 'line 1 .*: {"id": 0}; expected .* {"model": "m", "size": 4}; give another file'),
])  # fmt: skip
def test_a_file_of_other_lines_is_refused_and_left_alone(tmp_path, settings, text, named):
    path = tmp_path / "out"
    path.write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(ValueError, match=named):
        add_missing(path, settings)
    assert path.read_text("utf-8", "surrogateescape") == text
