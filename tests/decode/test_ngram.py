"""Suffix matching and prompt lookup against string search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import ngram
from specjax.decode.types import DecodeState
from specjax.drafters import PromptLookup


def runs_by_hand(tokens, end, longest):
    out = []
    for j in range(len(tokens)):
        run = 0
        while j < end and run < min(longest, j) and tokens[j - run - 1] == tokens[end - run - 1]:
            run += 1
        out.append(run)
    return out


@pytest.mark.parametrize("longest", [0, 1, 2, 5])
def test_suffix_runs(longest):
    rng = np.random.default_rng(0)
    for end in (0, 1, 2, 9, 20):
        tokens = rng.integers(2, size=20).astype(np.int32)
        got = ngram.suffix_runs(jnp.asarray(tokens), jnp.int32(end), longest)
        assert got.tolist() == runs_by_hand(tokens.tolist(), end, longest)


def propose(drafter, prompts, size):
    tokens = np.zeros((len(prompts), 32), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = jnp.array([len(p) for p in prompts])
    fields = dict.fromkeys(DecodeState._fields) | {"tokens": jnp.asarray(tokens), "lengths": lengths}
    draft = drafter.propose(None, (), DecodeState(**fields), None, size)[0]
    return [t[v].tolist() for t, v in zip(np.asarray(draft.tokens), np.asarray(draft.valid), strict=True)]


def text(kind, rng, length):
    """Tokens with matches of every length, of which none, one or many are the longest."""
    if kind == "random":
        return rng.integers(rng.integers(1, 5), size=length)
    if kind == "repeated":
        return np.resize(rng.integers(9, size=rng.integers(1, 9)), length)
    parts = [rng.integers(4, size=rng.integers(1, 12)) for _ in range(3)]  # phrases come again and again, cut
    chosen = [part[rng.integers(len(part)) :] for part in (parts[i] for i in rng.integers(3, size=length))]
    return np.concatenate(chosen)[:length]


@pytest.mark.parametrize("kind", ["random", "repeated", "phrases"])
@pytest.mark.parametrize("longest", [1, 2, 3, 4, 7, 64])
def test_the_longest_match_is_that_of_all_runs(kind, longest, monkeypatch):
    monkeypatch.setattr(ngram, "GROUP", 8)  # so that several groups are looked at
    rng, match = np.random.default_rng(longest), jax.jit(ngram.longest_match, static_argnums=2)
    for _ in range(60):
        tokens, end = text(kind, rng, 150).astype(np.int32), int(rng.integers(1, 151))
        runs = np.array(runs_by_hand(tokens.tolist(), end, longest))[:end]
        run, at = match(tokens, jnp.int32(end), longest)
        assert (int(run), int(at)) == (runs.max(), np.flatnonzero(runs == runs.max())[-1])


def work(longest, tokens):
    """What finding a match costs by the compiler, and how many groups are looked at."""

    def cost(function, longest):  # a loop's body counts once
        lowered = jax.jit(function, static_argnums=2).lower(tokens, jnp.int32(len(tokens)), longest)
        return lowered.compile().cost_analysis()["flops"]

    looked, runs_at = 0, ngram._runs_at

    def counting(*args):
        nonlocal looked
        looked += 1
        return runs_at(*args)

    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
        patch.setattr(ngram, "_runs_at", counting)
        ngram.longest_match(tokens, jnp.int32(len(tokens)), longest)
    return cost(ngram.longest_match, longest) + (ngram.SHORT - 1) * cost(ngram.suffix_runs, ngram.SHORT), looked


@pytest.mark.parametrize("kind", ["random", "repeated"])
def test_a_long_match_costs_no_more_than_a_short_one(kind):
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(text(kind, rng, 40_000) if kind == "repeated" else rng.zipf(1.3, 40_000) % 5000, jnp.int32)
    short, long = work(3, tokens), work(64, tokens)
    assert short[1] == 0 and long[1] <= 1
    assert long[0] <= 1.5 * short[0]


def test_longest_then_latest_match_wins():
    by_length = [1, 2, 3, 9, 9, 5, 3, 8, 8, 1, 2, 3]  # "1 2 3" beats the later "3"
    latest = [4, 7, 4, 8, 1, 4]
    assert propose(PromptLookup(prompt_lookup_min=1), [by_length, latest], 2) == [[9, 9], [8, 1]]
    assert propose(PromptLookup(prompt_lookup_max=1, prompt_lookup_min=1), [by_length], 2) == [[8, 8]]
    assert propose(PromptLookup(prompt_lookup_min=2), [latest], 2) == [[]]


def test_a_copy_that_reaches_the_end_repeats_itself():
    assert propose(PromptLookup(), [[1, 2, 1, 2]], 5) == [[1, 2, 1, 2, 1]]


def test_rows_without_a_hit_propose_nothing():
    assert propose(PromptLookup(3, 1), [[3], [1, 2, 3, 4], [5, 6, 5]], 2) == [[], [], [6, 5]]


@pytest.mark.parametrize("low, high", [(0, 3), (3, 2), (1.5, 3), (1, "3")])
def test_bad_ngram_sizes_are_refused(low, high):
    with pytest.raises(ValueError, match="prompt_lookup_min"):
        PromptLookup(prompt_lookup_max=high, prompt_lookup_min=low)


@pytest.mark.parametrize("longest", [10**9, np.int32(10**9)])
def test_a_run_is_searched_no_further_than_the_sequence_goes(monkeypatch, longest):
    """Counted in turns of the loop: a number beyond every text must cost no more than the text."""
    turns, loop = [], ngram.lax.fori_loop
    monkeypatch.setattr(ngram.lax, "fori_loop", lambda low, high, *rest: turns.append(int(high)) or loop(low, 3, *rest))
    tokens = jnp.array([1, 2, 1, 2, 0, 0])
    ngram.suffix_runs(tokens, jnp.int32(4), longest if isinstance(longest, int) else jnp.asarray(longest))
    assert turns[0] <= len(tokens) + 1
