"""Lines of progress: on a terminal, for scripts, and nowhere else."""

import io
import sys
import time

import pytest

from specjax.report import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.setattr(progress, "_shown", False)

    def on(stream, asked=True):
        monkeypatch.setattr(sys, "stderr", stream)
        if asked:
            progress.show()
        assert list(progress.bar(range(3), desc="counting", mininterval=0)) == [0, 1, 2]
        with progress.waiting("thinking"):
            time.sleep(0.01)
        return stream.getvalue()

    return on


def test_a_terminal_shows_progress_and_is_clean_afterwards(shown):
    text = shown(Terminal())
    assert "counting:  33%" in text and "thinking" in text
    assert text.endswith("\r") and "\n" not in text


def test_a_pipe_gets_nothing(shown):
    assert shown(io.StringIO()) == ""


def test_the_library_shows_nothing_until_a_script_asks(shown):
    assert shown(Terminal(), asked=False) == ""


def test_lines_are_printed_above_a_bar(capsys, shown):
    shown(io.StringIO())
    progress.say("a line")
    assert capsys.readouterr().out == "a line\n"
