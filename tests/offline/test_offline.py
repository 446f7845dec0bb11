"""A data set through an engine: rows in, answers out, whatever a row holds and whenever the job is stopped."""

import itertools
import json
import signal

import pytest
from commands import script

import specjax
from specjax import testing
from specjax.offline import files
from specjax.offline.rows import answers, row_of

LM = testing.tiny_lm(0, max_position_embeddings=1024)
SIZES = dict(drafter="ngram", num_speculative_tokens=3, slots=2, capacity=256)
ALONE = dict(drafter="ngram", num_speculative_tokens=3, block_width=4)
GIVEN = [
    {"prompt": [1, 2, 3, 1, 2, 3], "max_new_tokens": 8},
    {"id": "warm", "prompt": [7, 8, 7, 8], "temperature": 1.0, "max_new_tokens": 30},
    {"prompt": [4, 5], "top_k": "three"},
    {"prompt": [4, 5], "temperature": 0.9, "seed": 77, "logprobs": 2, "max_new_tokens": 5},
    {"prompt": [9], "logit_bias": {"3": 5.0}, "temperature": 1.0, "max_new_tokens": 4},
]
BAD = [
    7, {}, {"prompt": [1], "messages": []}, {"prompt": [1], "topk": 1}, {"id": [], "prompt": [1]}, {"prompt": "text"},
    {"prompt": [1], "drafter": "none"}, {"prompt": [1], "allowed_token_ids": 3}, {"prompt": []},
    {"prompt": [1], "logit_bias": {"x": 1}}, {"prompt": [1], "allowed_token_ids": [1], "logit_bias": {"1": -1e999}},
]  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    with specjax.Engine(LM, **SIZES) as engine:
        yield engine


def alone(given, seed):
    """The tokens of a row by itself."""
    options = {name: value for name, value in given.items() if name not in ("id", "prompt")}
    if "logit_bias" in options:
        options["logit_bias"] = {int(token): value for token, value in options["logit_bias"].items()}
    return specjax.generate(LM, [given["prompt"]], **ALONE, capacity=320, **{"seed": seed, **options}).tokens[0]


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_each_row_has_the_tokens_that_it_has_alone(engine):
    rows = [row_of(i, given, {}, 10) for i, given in enumerate(GIVEN)]
    found = {answer["id"]: answer for answer in answers(engine, rows)}
    assert set(found) == {0, "warm", 2, 3, 4} and "top_k must be" in found[2]["error"]
    for place, name in enumerate([0, "warm", None, 3, 4]):
        if name is not None:
            assert found[name]["tokens"] == alone(GIVEN[place], 10 + place), name
            assert found[name]["seed"] == GIVEN[place].get("seed", 10 + place)
    assert len(found[3]["logprobs"]) == 5 and len(found[3]["top_logprobs"][0]) == 2


def test_a_bad_row_becomes_an_error_and_the_others_go_on(engine):
    good = {"prompt": [1, 2], "max_new_tokens": 2}
    given = [*itertools.chain.from_iterable((bad, good) for bad in BAD)]
    found = list(answers(engine, [row_of(i, one, {}, 0) for i, one in enumerate(given)], keep_order=True))
    assert [answer["id"] for answer in found] == list(range(len(given)))
    assert all(answer["error"] for answer in found[::2]) and all(len(answer["tokens"]) == 2 for answer in found[1::2])


def test_defaults_hold_for_rows_without_the_field(engine):
    rows = [row_of(i, one, {"max_new_tokens": 3}, 0) for i, one in enumerate([{"prompt": [1]}, GIVEN[0]])]
    assert [len(answer["tokens"]) for answer in answers(engine, rows, keep_order=True)] == [3, 8]


def test_rows_without_end_are_read_as_they_are_needed_and_order_is_kept(engine):
    read = itertools.count()
    lengths = [40, 1, 1, 1, 9, 1]
    rows = (row_of(i, {"prompt": [i % 50], "max_new_tokens": lengths[i % 6]}, {}, 0) for i in read)
    found = list(itertools.islice(answers(engine, rows, keep_order=True), 30))
    assert [answer["id"] for answer in found] == list(range(30))
    assert next(read) < 30 + 6 * 2 * SIZES["slots"]


def test_a_stopped_file_goes_on_and_its_half_line_is_repaired(engine, tmp_path):
    source = write(tmp_path / "in", [*GIVEN[:2], "not json\n", "\n", GIVEN[3], {**GIVEN[0], "id": "warm"}])
    whole, target = tmp_path / "whole", tmp_path / "out"
    totals = files.run(engine, source, whole, seed=3, keep_order=True)
    assert (totals.found, totals.written, totals.errors) == (0, 5, 2)
    assert [answer["id"] for answer in written(whole)] == [0, "warm", 2, 4, "warm (line 6)"]
    text = whole.read_bytes()
    for cut in (len(text) // 2, len(text)):
        target.write_bytes(text[:cut])
        totals = files.run(engine, source, target, seed=3, keep_order=True)
        assert target.read_bytes() == text and totals.found + totals.written == 5
    assert totals.written == 0


def test_a_file_of_rows_is_never_taken_for_one_of_answers(engine, tmp_path):
    source, other = write(tmp_path / "in", GIVEN), write(tmp_path / "other", GIVEN)
    for target, named in ((source, "the file of rows itself"), (other, "line 1 is not of this run")):
        with pytest.raises(ValueError, match=named):
            files.run(engine, source, target)
    assert source.read_text() == other.read_text()


def test_a_signal_ends_the_job_after_the_finished_rows_and_the_rest_follows(tmp_path, monkeypatch):
    source = write(tmp_path / "in", [{"prompt": [i], "max_new_tokens": 200 if i % 3 else 2} for i in range(20)])
    target, before = tmp_path / "out", [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    try:
        with specjax.Engine(LM, **SIZES) as engine:
            stopped = script("generate_many").stop_at_signals(engine)
            missing = files._missing

            def interrupted(*args):
                for row in missing(*args):
                    if row.place == 7:
                        signal.raise_signal(signal.SIGINT)
                    yield row

            monkeypatch.setattr(files, "_missing", interrupted)
            totals = files.run(engine, source, target)
            assert stopped.is_set() and 0 < totals.written < 20 and totals.errors == 0
            assert len(written(target)) == totals.written
    finally:
        for one, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(one, handler)
    monkeypatch.undo()
    with specjax.Engine(LM, **SIZES) as engine:
        assert files.run(engine, source, target).found == totals.written
    found = {answer["id"]: answer["tokens"] for answer in written(target)}
    assert len(written(target)) == 20 and all(len(found[i]) == (200 if i % 3 else 2) for i in range(20))


def test_an_engine_that_breaks_ends_the_job_with_its_error(monkeypatch):
    with specjax.Engine(LM, **SIZES) as engine:
        monkeypatch.setattr(engine._loop, "_dispatch", lambda: 1 / 0)
        with pytest.raises(specjax.EngineClosedError, match="division by zero"):
            list(answers(engine, [row_of(0, GIVEN[0], {}, 0)]))
