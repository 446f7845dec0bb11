"""Suffix matching and prompt lookup against string search."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode.ngram import suffix_runs
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
        got = suffix_runs(jnp.asarray(tokens), jnp.int32(end), longest)
        assert got.tolist() == runs_by_hand(tokens.tolist(), end, longest)


def propose(drafter, prompts, size):
    tokens = np.zeros((len(prompts), 32), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = jnp.array([len(p) for p in prompts])
    fields = dict.fromkeys(DecodeState._fields) | {"tokens": jnp.asarray(tokens), "lengths": lengths}
    draft, _ = drafter.propose(None, DecodeState(**fields), None, size)
    return [t[v].tolist() for t, v in zip(np.asarray(draft.tokens), np.asarray(draft.valid), strict=True)]


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
