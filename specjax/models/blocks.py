"""The block of each layer: which cached tokens its queries see, and how its queries and keys are rotated.

All layers of a Llama share one block. A relative may have layers of four kinds: with a sliding window or without
(Beltagy et al. 2020, Longformer, section 3.1), and rotated or not.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decode.arrays import span
from specjax.models import rope
from specjax.models.attention import Block
from specjax.models.cache import KVCache
from specjax.models.config import LlamaConfig


def blocks(config: LlamaConfig, cache: KVCache, positions: jax.Array, mask: jax.Array | None) -> list[Block]:
    """The block of each layer, for tokens at positions i32[B, T]. ``mask`` as in a call of the model."""
    c = config
    everywhere = Block(cache.lengths, rope.cos_sin(c, positions), mask, table=cache.table)
    local = everywhere
    if c.rope_local_base_freq is not None:
        own = dataclasses.replace(c, rope_theta=c.rope_local_base_freq, rope_scaling=None)
        local = local._replace(angles=rope.cos_sin(own, positions))
    if c.sliding_window is not None and c.sliding_window < cache.capacity:
        local = local._replace(mask=window_mask(cache, positions.shape[1], mask, c.sliding_window))
    of_layers = [local if i in c.local_layers else everywhere for i in range(c.num_hidden_layers)]
    return [b._replace(angles=None) if i in c.unrotated_layers else b for i, b in enumerate(of_layers)]


def window_mask(cache: KVCache, size: int, mask: jax.Array | None, window: int) -> jax.Array:
    """The slots that each of ``size`` tokens sees in a layer with a window, bool[B, T, S].

    A token sees itself and the ``window`` - 1 tokens before it. In a tree these are the last ``window`` slots that
    ``mask`` shows to the token: a branch has one token for each position, and its slots rise with their positions.
    """
    if mask is None:
        slots = span(cache.capacity)[None]  # [1, 1, S]
        own = (cache.lengths[:, None] + span(size))[..., None]  # [B, T, 1]
        return (slots <= own) & (slots > own - window)
    from_here = jnp.cumsum(mask[..., ::-1], axis=-1, dtype=jnp.int32)[..., ::-1]  # visible slots from each one on
    return mask & (from_here <= window)
