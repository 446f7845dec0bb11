"""Lazy prefill: a draft's cache catches up with the committed text when the row first drafts, or after a pause."""

import jax
import jax.numpy as jnp
from jax import lax

from specjax.models import cache as kv
from specjax.models.cache import KVCache
from specjax.models.lm import LM
from specjax.types import DecodeState


def catch_up(lm: LM, cache: KVCache, state: DecodeState, wanted: jax.Array, chunk: int) -> KVCache:
    """Feeds committed tokens, ``chunk`` at a time, until each active row's cache holds ``wanted`` i32[B] of them.

    The cache needs room for ``chunk`` tokens past the longest row.
    """

    def behind(cache: KVCache):
        return jnp.any(state.active & (cache.lengths < wanted))

    def feed(cache: KVCache) -> KVCache:
        index = cache.lengths[:, None] + jnp.arange(chunk)
        tokens = jnp.take_along_axis(state.tokens, index, axis=1, mode="clip")
        out = lm(tokens, cache, with_logits=False)
        return kv.with_lengths(out.cache, jnp.minimum(cache.lengths + chunk, jnp.maximum(wanted, cache.lengths)))

    return lax.while_loop(behind, feed, cache)
