"""Rounds that draft more, less and nothing in turn: the same texts, and no more drafting than pays."""

import numpy as np
import pytest
from drafter_table import DRAFTERS, TARGET, TARGETS, TREES

import specjax
from specjax.engine import loop
from specjax.engine.pace import TRIAL, Pace

QUICK = ("noisy twin",)
LONG = ("prompt lookup", "noisy twin", "head")  # whose drafts are often as long as a round allows
PROMPTS = [np.random.default_rng(i).integers(0, 4, n).tolist() for i, n in enumerate((5, 1, 70, 30))]


class InTurn:
    """Three rounds that draft all of K = 3, two that draft one token, and two that draft nothing."""

    def __init__(self, kinds):
        assert set(kinds) == {0, 1, 3}
        self.rounds, self.learned = 0, set()

    def next_kind(self):
        self.rounds += 1
        return (3, 1, 3, 3, 0, 0, 1)[self.rounds % 7]

    def learn(self, kind, seconds, tokens):
        assert tokens <= kind + 1
        self.learned.add(kind)


def each_drafter():
    silent = [name for name in DRAFTERS if name not in TREES and "lookahead" not in name]
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in silent]


@pytest.mark.parametrize("name", each_drafter())
def test_shorter_and_plain_rounds_between_others_change_no_token(name, monkeypatch):
    """By ``coupled`` a text depends on neither drafts nor rounds. After a plain round drafts are as good as before."""
    monkeypatch.setattr(loop, "Pace", InTurn)
    target = TARGETS.get(name, TARGET)
    way = dict(drafter=DRAFTERS[name], verifier="coupled", num_speculative_tokens=3)
    asked = dict(max_new_tokens=30, temperature=0.9, ignore_eos=True)
    expected = specjax.generate(target, PROMPTS, seed=0, verifier="coupled", **asked).tokens
    with specjax.Engine(target, slots=2, capacity=128, prefill_chunk=64, exact=False, **way) as engine:
        results = [engine.submit(p, seed=i, **asked) for i, p in enumerate(PROMPTS)]
        found = [handle.result() for handle in results]
        assert engine._loop.pace.learned == {0, 1, 3}, "the rounds that nothing held up are measured"
    assert [result.tokens[0] for result in found] == expected
    drafted = [n for result in found for n in result.metrics[0].per_step_drafted]
    assert 0 in drafted and max(drafted) > 0 and (name not in LONG or {1, 3} <= set(drafted))


def simulated(seconds, tokens, rounds=2000):
    """The share of each kind of rounds, and the tokens per second over those of plain rounds alone."""
    pace, shares = Pace(seconds), dict.fromkeys(seconds, 0.0)
    for _ in range(rounds):
        kind = pace.next_kind()
        pace.learn(kind, seconds[kind], tokens[kind])
        shares[kind] += 1 / rounds
    gave, took = (sum(shares[kind] * of[kind] for kind in shares) for of in (tokens, seconds))
    return shares, gave / took * seconds[0] / tokens[0]


def test_each_kind_is_kept_while_it_is_the_fastest_and_drafting_that_costs_is_left():
    seconds = {0: 1.0, 2: 1.5, 4: 2.0}
    for tokens, best in (((1, 2, 3.5), 4), ((1, 2, 2.2), 2), ((1, 1.3, 1.5), 0)):
        shares, speed = simulated(seconds, dict(zip(seconds, tokens, strict=True)))
        assert shares[best] > 0.96 and min(shares.values()) > 0 and speed > 0.98


def test_one_slow_round_changes_nothing():
    pace = Pace([0, 2])
    for kind, seconds, tokens in [(2, 2.0, 3.0), (0, 1.0, 1.0)] * 9:
        pace.learn(kind, seconds, tokens)
    pace.learn(2, 100.0, 3.0)
    assert pace.next_kind() == 2


def test_a_single_kind_is_always_chosen():
    pace = Pace([5])
    assert {pace.next_kind() for _ in range(3 * TRIAL)} == {5}
