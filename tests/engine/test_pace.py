"""Rounds that draft and plain rounds in turn: the same texts, and no more drafting than pays."""

import numpy as np
import pytest
from drafter_table import DRAFTERS, TARGET, TARGETS, TREES

import specjax
from specjax.engine import engine as engines
from specjax.engine.pace import TRIAL, Pace

QUICK = ("prompt lookup", "noisy twin", "head")
PROMPTS = [np.random.default_rng(i).integers(0, 4, n).tolist() for i, n in enumerate((5, 1, 70, 30))]


class InTurn:
    """Three rounds that draft, then two plain ones."""

    def __init__(self):
        self.rounds = 0

    def next_drafts(self):
        self.rounds += 1
        return self.rounds % 5 < 3

    def learn(self, drafted, seconds, tokens):
        assert drafted or tokens == 1


def each_drafter():
    silent = [name for name in DRAFTERS if name not in TREES and "lookahead" not in name]
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in silent]


@pytest.mark.parametrize("name", each_drafter())
def test_plain_rounds_between_drafted_ones_change_no_token(name, monkeypatch):
    """By ``coupled`` a text depends on neither drafts nor rounds. After a plain round drafts are as good as before."""
    monkeypatch.setattr(engines, "Pace", InTurn)
    target = TARGETS.get(name, TARGET)
    way = dict(drafter=DRAFTERS[name], verifier="coupled", num_speculative_tokens=3)
    asked = dict(max_new_tokens=30, temperature=0.9, ignore_eos=True)
    expected = specjax.generate(target, PROMPTS, seed=0, verifier="coupled", **asked).tokens
    with specjax.Engine(target, slots=2, capacity=128, prefill_chunk=64, exact=False, **way) as engine:
        results = [engine.submit(p, seed=i, **asked) for i, p in enumerate(PROMPTS)]
        found = [handle.result() for handle in results]
    assert [result.tokens[0] for result in found] == expected
    assert engine._loop.pace is not None
    drafted = [n for result in found for n in result.metrics[0].per_step_drafted]
    assert 0 in drafted and max(drafted) > 0


def simulated(drafted, plain, accepted, rounds=2000):
    """The share of drafted rounds, and the tokens per second over those of plain rounds alone."""
    pace, drafts, seconds, tokens = Pace(), 0, 0.0, 0.0
    for _ in range(rounds):
        kind = pace.next_drafts()
        took, gave = (drafted, accepted) if kind else (plain, 1.0)
        pace.learn(kind, took, gave)
        drafts, seconds, tokens = drafts + kind, seconds + took, tokens + gave
    return drafts / rounds, tokens / seconds * plain


def test_drafting_that_pays_is_kept_and_drafting_that_costs_is_left():
    assert simulated(drafted=2.0, plain=1.0, accepted=3.5)[0] > 0.95
    share, speed = simulated(drafted=2.0, plain=1.0, accepted=1.5)
    assert share < 2 / TRIAL and speed > 0.98


def test_one_slow_round_changes_nothing():
    pace = Pace()
    for kind, seconds, tokens in [(True, 2.0, 3.0), (False, 1.0, 1.0)] * 9:
        pace.learn(kind, seconds, tokens)
    pace.learn(True, 100.0, 3.0)
    assert pace.next_drafts()
