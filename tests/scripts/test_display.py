"""What generate.py shows: colours by where a token came from, and none where no person reads them."""

import re
import sys

import pytest
from cli import display
from commands import run, script

from specjax import generate, stream, testing
from specjax.drafters import PromptLookup
from specjax.generation.generate import prepare
from specjax.measure import timing

CODES = re.compile(r"\033\[\d+m")


def test_each_event_says_where_its_token_came_from():
    lm = testing.tiny_lm(seed=1, vocab_size=5)
    options = dict(drafter=PromptLookup(), num_speculative_tokens=2, max_new_tokens=30, temperature=1.0)
    events = stream(lm, [[1, 2, 1, 2], [3, 3, 3]], **options)
    origins = [[], []]
    for event in events:
        origins[event.row].append(event.origin)
        assert event.from_draft == (event.origin == "accepted")
    assert origins == [metrics.origins() for metrics in events.result().metrics]
    assert {"accepted", "correction", "bonus", "plain"} == {*origins[0], *origins[1]}
    assert generate(lm, [[1, 2, 1, 2]], **options).metrics[0].origins() == origins[0]


@pytest.mark.parametrize("flags", [(), ("--no-stream",), ("--prompt", "xyz")])
def test_text_is_coloured_on_a_terminal(capsys, monkeypatch, folder, flags):
    args = ("--model", folder, "--prompt", "abcabcabc", *flags)
    plain = run(capsys, *args)[1]
    assert "\033" not in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = run(capsys, *args)[1]
    text = shown.split(display.legend())[0]
    assert plain.startswith(CODES.sub("", text)) and len(CODES.findall(text)) >= 4
    assert CODES.sub("", shown).count("\n") == plain.count("\n") + 2  # the legend
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in run(capsys, *args)[1]


def test_the_demonstration_says_what_plain_decoding_would_have_taken(capsys, monkeypatch, folder):
    generate_script = script("generate")
    monkeypatch.setattr(generate_script, "read_prompts", lambda args: ["abcabcabc"])
    monkeypatch.setattr(timing, "plain_step", lambda job: 0.25)
    assert generate_script.main(["--model", folder, "--max-new-tokens", "12"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("plain decoding would have taken about 3.00 s (12 steps of 250 ms, as timed")


def test_a_plain_step_is_timed_alone():
    job = prepare(testing.tiny_lm(seed=1), [[1, 2, 3]], drafter=PromptLookup(), max_new_tokens=4)
    assert timing.plain_step(job) > 0


def test_the_heading_shows_a_long_prompt_on_one_line():
    shown = display.heading(testing.tiny_lm(), "tiny", {"name": "ngram"}, 5, ["one\ntwo " * 999])
    assert shown.count("\n") == 3 and "prompt   one two one" in shown and shown.endswith(" ...\n") and len(shown) < 500
    assert "drafter  ngram, at most 5 tokens a round" in shown
    assert "2 prompts" in display.heading(testing.tiny_lm(), "tiny", {"name": "none"}, 0, ["a", "b"])
