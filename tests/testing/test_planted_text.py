"""Planted models write words of a tokenizer, and are drafted for and learned as far as they were planted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_tokenizers import byte_level

import specjax
from specjax.drafters import DraftModel
from specjax.measure.benchmark.case import SHAPES
from specjax.testing.planted_text import planted_writer, planted_writers, words


def test_words_are_whole_characters_and_no_special_tokens():
    known = words(byte_level(), 1000)
    assert not any("\ufffd" in byte_level().decode([i]) for i in known) and min(known) > 2 and len(known) > 90
    assert words(byte_level(), 5).tolist() == known[:5].tolist()


@pytest.mark.slow
def test_planted_models_write_words_and_draft_them():
    tokenizer = byte_level()
    lm, draft, head = planted_writers(SHAPES["tiny"], SHAPES["tiny"], 0.5, 2, tokenizer, dtype=np.float32)
    start = tokenizer.encode("a")[1:]
    options = dict(num_speculative_tokens=2, max_new_tokens=24)
    plain = specjax.generate(lm, [start], drafter=None, max_new_tokens=24).tokens[0]
    assert set(plain) <= set(words(tokenizer, 1000).tolist()) and len(tokenizer.decode(plain)) == 24
    for drafter in (DraftModel(draft), head):
        out = specjax.generate(lm, [start], drafter=drafter, **options)
        assert out.tokens[0] == plain and 0 < out.metrics[0].draft_acceptance_rate < 1


def test_a_planted_writer_leaves_its_cycle_by_chance_but_never_its_words():
    """By the law itself: after each word one successor has the planted share, and nothing but words has any."""
    tokenizer = byte_level()
    lm = planted_writer(SHAPES["tiny"], tokenizer, peak=6.0, dtype=np.float32)
    known = words(tokenizer, 1000)
    tokens = jnp.asarray(known)[None]
    law = np.asarray(jax.nn.softmax(lm(tokens, lm.alloc_cache(1, len(known))).logits[0]))
    assert sorted(law.argmax(axis=1)) == known.tolist(), "a permutation"
    assert law[:, np.setdiff1d(np.arange(lm.vocab_size), known)].max() == 0
    share = np.exp(6.0) / (np.exp(6.0) + len(known))
    assert 0.6 * share < np.median(law.max(axis=1)) < 1.2 * share
