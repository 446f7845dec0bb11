"""What single drafters promise beyond the conformance table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import random, sampling
from specjax.drafters import DraftModel, PromptLookup
from specjax.testing import chi_square, joint_law, sample_sequences, tiny_lm
from specjax.testing.laws import count_sequences


@pytest.mark.parametrize("new", [2, 120])
def test_b15_hit_and_miss_rounds_alternate(new):
    lm = tiny_lm(0, max_position_embeddings=256)
    listed = [5, 9, 2, 7, 11, 3]
    prompts = [listed * 3, listed + [1, 8] + listed[:4]]
    plain = specjax.generate(lm, prompts, max_new_tokens=new)
    for size in (1, 4):
        out = specjax.generate(lm, prompts, drafter="ngram", num_speculative_tokens=size, max_new_tokens=new)
        assert out.tokens == plain.tokens
    if new > 2:
        kinds = {drafted > 0 for m in out.metrics for drafted in m.per_step_drafted}
        assert kinds == {True, False}, "the prompts should make rounds with and without a match"


def test_prompt_lookup_takes_the_longest_then_the_latest_match_and_goes_on_with_its_own_copy():
    def propose(tokens, **fields):
        row = jnp.zeros((1, 32), jnp.int32).at[0, : len(tokens)].set(jnp.array(tokens))
        state = _State(row, jnp.array([len(tokens)]))
        draft, _ = PromptLookup(**fields).propose(None, state, None, 4)
        return draft.tokens[0].tolist() if bool(draft.valid[0, 0]) else None

    assert propose([1, 2, 3, 9, 2, 3, 7, 1, 2, 3]) == [9, 2, 3, 7]  # three tokens beat the later two
    assert propose([2, 3, 9, 8, 2, 3, 7, 6, 2, 3]) == [7, 6, 2, 3]  # the later of two equals
    assert propose([4, 5, 6, 5, 6]) == [5, 6, 5, 6]  # the copy runs into itself
    assert propose([1, 2, 3]) is None
    assert propose([1, 2, 1]) is None and propose([1, 2, 1], prompt_lookup_min=1) == [2, 1, 2, 1]


class _State:
    def __init__(self, tokens, lengths):
        self.tokens, self.lengths = tokens, lengths


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_b13_bfloat16_models_are_sampled_and_judged_in_float32(temperature):
    target, draft = (tiny_lm(seed, std=0.6, dtype=jnp.bfloat16, vocab_size=8) for seed in (3, 4))
    rows, prompt = 8000, [1, 2, 3]
    drawn = sample_sequences(
        target, prompt, rows, 2, drafter=DraftModel(draft), num_speculative_tokens=2, temperature=temperature
    )
    law = joint_law(target, prompt, 2, temperature=temperature)
    assert chi_square(count_sequences(drawn, 8), law) > 1e-4


def test_b13_q_is_the_float32_array_that_was_sampled():
    lm = tiny_lm(3, std=0.6, dtype=jnp.bfloat16, vocab_size=8)
    job = specjax.generation.prepare(
        lm, [[1, 2, 3]], specjax.Options(drafter=DraftModel(lm), num_speculative_tokens=3, temperature=0.7)
    )
    state = job.start(job.request)
    keys = job.verifier.draft_keys(state.key, state.lengths)
    draft, _ = jax.jit(DraftModel.propose, static_argnums=4)(job.drafter, lm, state, keys, 3)
    assert draft.probs.dtype == jnp.float32
    assert np.allclose(draft.probs.sum(-1), 1, atol=1e-6)
    again = random.categorical(random.at(keys, state.lengths[:, None] + jnp.arange(3)), draft.probs)
    assert np.array_equal(again, draft.tokens)
    assert isinstance(state.sampling, sampling.SamplingParams)
