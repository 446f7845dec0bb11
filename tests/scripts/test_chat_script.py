"""chat.py, run in this process on a tiny checkpoint."""

import io
import json

import pytest
from commands import script

import specjax

SMALL = ["--max-new-tokens", "8", "--capacity", "192", "--drafter", "ngram", "--compilation-cache", "none"]


def talk(monkeypatch, capsys, folder, *lines, flags=()):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    code = script("chat").main(["--model", folder, *SMALL, *flags])
    return code, *capsys.readouterr()


def test_a_conversation_is_kept_repeated_compared_and_saved(monkeypatch, capsys, folder, tmp_path):
    saved = tmp_path / "chat.json"
    code, out, err = talk(
        monkeypatch, capsys, folder, "abcabc", "/again", "/compare", "bcd", f"/save {saved}", "/new", "/again"
    )
    assert code == 0
    notes = [line for line in err.splitlines() if line.startswith("[")]
    found = json.loads(saved.read_text())
    assert [m["role"] for m in found["messages"]] == ["user", "assistant"] * 2 and found["next_seed"] == 2
    assert notes[0].split("seed")[1][:2] == notes[1].split("seed")[1][:2] == " 0" and "seed 1" in notes[3]
    assert "drafted" in notes[2] and "times as fast" in notes[2]
    assert out.count(found["messages"][1]["content"]) == 2
    assert notes[-1] == "[there is no answer yet]"


def test_settings_change_and_what_cannot_be_done_is_said(monkeypatch, capsys, folder):
    commands = ("/temperature 0", "/seed 7", "/max 3", "a", "/drafter none", "a", "/drafter best", "/fly", "/top-p x")
    code, out, err = talk(monkeypatch, capsys, folder, *commands)
    notes = [line for line in err.splitlines() if line.startswith("[")]
    assert code == 0 and "[3 tokens" in notes[0] and "seed 7" in notes[0] and "seed 8" in notes[1]
    assert "no drafter 'best'" in notes[2] and "no command /fly" in notes[3]
    assert notes[4] == "[/top-p takes a number, got 'x']"


def test_ctrl_c_during_a_command_ends_the_command_and_loses_nothing(monkeypatch, capsys, folder):
    chat = script("chat")
    warmup, calls = specjax.Engine.warmup, []

    def interrupted(engine):
        calls.append(engine)
        if len(calls) == 2:  # the engine of the new drafter
            raise KeyboardInterrupt
        warmup(engine)

    monkeypatch.setattr(specjax.Engine, "warmup", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("abcabc\n/drafter none\n/again\n"))
    assert chat.main(["--model", folder, *SMALL]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    assert notes[1] == "[stopped]" and notes[0].split(",")[0] == notes[2].split(",")[0]
    assert notes[0].split("seed")[1][:2] == notes[2].split("seed")[1][:2]


def test_ctrl_c_ends_an_answer_and_keeps_it(monkeypatch, capsys, folder):
    chat = script("chat")
    paint = chat.display.in_colour
    seen = []

    def interrupt():
        seen.append(1)
        if len(seen) == 4:  # the legend, then three tokens
            raise KeyboardInterrupt
        return paint()

    monkeypatch.setattr("sys.stdin", io.StringIO("abcabc\nbcd\n"))
    monkeypatch.setattr(chat.display, "in_colour", interrupt)
    code = chat.main(["--model", folder, *SMALL, "--max-new-tokens", "100"])
    _, err = capsys.readouterr()
    notes = [line for line in err.splitlines() if line.startswith("[")]
    assert code == 0 and "(stopped)" in notes[0] and "(stopped)" not in notes[1]


@pytest.mark.parametrize("flags, message", [(("--capacity", "0"), "capacity"), (("--temperature", "x"), "temperature")])
def test_bad_flags_are_refused(monkeypatch, capsys, folder, flags, message):
    with pytest.raises(SystemExit):
        talk(monkeypatch, capsys, folder, flags=flags)
    assert message in capsys.readouterr().err
