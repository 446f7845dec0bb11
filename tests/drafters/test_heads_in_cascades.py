"""Heads that draft for a cascade's draft model: they see the text after it was committed, and catch up."""

import dataclasses

import dflash_heads
import eagle_heads
import jax
import numpy as np
import pytest

from specjax.drafters import Cascade
from specjax.generation.generate import prepare


@pytest.mark.slow
@pytest.mark.parametrize("heads, cache_of", [
    pytest.param(eagle_heads, lambda own: own.cache, id="eagle"),
    pytest.param(dflash_heads, lambda own: own, id="dflash"),
])  # fmt: skip
def test_under_a_cascade_the_head_is_right_to_the_end_of_its_buffers(heads, cache_of):
    """The head then catches up round by round, in chunks that would not fit past the last tokens."""
    drafter = Cascade(dataclasses.replace(heads.random_head(), prefill_chunk=64), heads.TARGET, 3)

    def keys(capacity):
        options = dict(drafter=drafter, num_speculative_tokens=3, max_new_tokens=24, capacity=capacity)
        job = prepare(heads.TARGET, [[i % 12 for i in range(100)]], **options)
        cache = cache_of(jax.device_get(job.decoder.run(job.start()).drafter.inner))
        return cache.keys[0][:, :, : int(cache.lengths[0])]

    np.testing.assert_allclose(keys(None), keys(384), atol=1e-4)
