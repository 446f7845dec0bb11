"""Prompt lookup: which match it takes, and how rounds with and without a match alternate."""

import pytest
from proposals import propose

import specjax
from specjax.drafters import PromptLookup
from specjax.testing import tiny_lm


@pytest.mark.slow
def test_hit_and_miss_rounds_alternate():
    lm = tiny_lm(0, max_position_embeddings=256)
    listed = [5, 9, 2, 7, 11, 3]
    prompts = [listed * 3, listed + [1, 8] + listed[:4]]
    plain = specjax.generate(lm, prompts, max_new_tokens=120)
    for size in (1, 4):
        out = specjax.generate(lm, prompts, drafter="ngram", num_speculative_tokens=size, max_new_tokens=120)
        assert out.tokens == plain.tokens
        kinds = {drafted > 0 for m in out.metrics for drafted in m.per_step_drafted}
        assert kinds == {True, False}, "the prompts should make rounds with and without a match"


def test_prompt_lookup_takes_the_longest_then_the_latest_match_and_goes_on_with_its_own_copy():
    def found(tokens, **fields):
        [proposed] = propose(PromptLookup(**fields), [tokens], 4)
        return proposed or None

    assert found([1, 2, 3, 9, 2, 3, 7, 1, 2, 3]) == [9, 2, 3, 7]  # three tokens beat the later two
    assert found([2, 3, 9, 8, 2, 3, 7, 6, 2, 3]) == [7, 6, 2, 3]  # the later of two equals
    assert found([4, 5, 6, 5, 6]) == [5, 6, 5, 6]  # the copy runs into itself
    assert found([1, 2, 3]) is None
    assert found([1, 2, 1]) is None and found([1, 2, 1], prompt_lookup_min=1) == [2, 1, 2, 1]
