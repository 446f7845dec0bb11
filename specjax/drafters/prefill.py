"""Lazy prefill: a draft's cache catches up with the committed text when the row first drafts, or after a pause."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.arrays import span
from specjax.models import cache as kv
from specjax.models.cache import KVCache
from specjax.models.lm import LM
from specjax.numeric import is_int
from specjax.types import DecodeState


def check_chunk(prefill_chunk: Any) -> None:
    """Raises ValueError for what can't be a number of tokens."""
    if prefill_chunk is not None and not (is_int(prefill_chunk) and prefill_chunk >= 1):
        raise ValueError(f"prefill_chunk must be an integer of at least 1, or None, got {prefill_chunk!r}")


def chunk_size(asked: int | None) -> int:
    """Tokens fed at a time: a CPU pays for padding, a GPU wants large products."""
    if asked is not None:
        return asked
    return 64 if jax.default_backend() == "cpu" else 512


def catch_up(lm: LM, cache: KVCache, state: DecodeState, wanted: jax.Array, chunk: int | None) -> KVCache:
    """Feeds committed tokens, a chunk at a time, until each active row's cache holds ``wanted`` i32[B] of them."""
    size = min(chunk_size(chunk), cache.capacity)

    def behind(cache: KVCache):
        return jnp.any(state.active & (cache.lengths < wanted))

    def feed(cache: KVCache) -> KVCache:
        starts = jnp.minimum(cache.lengths, cache.capacity - size)  # near the end some entries are made once more
        index = starts[:, None] + span(size)
        tokens = jnp.take_along_axis(state.tokens, index, axis=1, mode="clip")
        out = lm(tokens, kv.with_lengths(cache, starts), with_logits=False)
        reached = jnp.minimum(starts + size, wanted)
        return kv.with_lengths(out.cache, jnp.maximum(reached, cache.lengths))

    return lax.while_loop(behind, feed, cache)
