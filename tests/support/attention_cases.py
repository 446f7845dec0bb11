"""Calls of attention: short and long caches, grouped heads, trees, blocks that see all of themselves."""

import jax
import jax.numpy as jnp

from specjax.models import cache as kv
from specjax.models import rope
from specjax.models.config import LlamaConfig

# Rows' lengths, tokens, kv heads, queries a kv head, head size, capacity, whether a mask is given:
# of a tree at random, or "whole" for a block in which each token sees all others.
CASES = {
    "one token": ((77,), 1, 2, 4, 64, 128, False),
    "nothing cached yet": ((0, 131), 6, 2, 4, 32, 200, False),
    "to the end, three queries a head": ((91, 7), 5, 1, 3, 64, 96, False),
    "a tree": ((3, 131, 60), 6, 2, 4, 128, 256, True),
    "a whole block over two tiles": ((60, 3), 5, 1, 3, 64, 128, "whole"),
    "a long cache, cut among programs": ((900, 0, 255), 2, 2, 4, 64, 1024, False),
    "a tree on a long cache": ((1011, 640), 8, 1, 3, 64, 1024, True),
}


def case(lengths, block, heads, group, dim, capacity, masked):
    """Arguments of attend, with NaN wherever a cache entry is stale: no such entry may reach a result."""
    keys = jax.random.split(jax.random.key(len(lengths) + block), 4)
    batch, starts = len(lengths), jnp.array(lengths, jnp.int32)
    config = LlamaConfig(8, heads * group * dim, 8, 1, heads * group, heads, dim)
    slots = starts[:, None] + jnp.arange(block)
    angles = rope.cos_sin(config, slots)
    qkv = jax.random.normal(keys[0], (batch, block, heads, group + 2, dim), jnp.bfloat16)
    buffers = [jax.random.normal(key, (batch, heads, capacity, dim), jnp.bfloat16) for key in keys[1:3]]
    own = jnp.arange(capacity) == slots[..., None]  # [B, T, S]
    seen = (jnp.arange(capacity) <= slots[..., None]) & jax.random.bernoulli(keys[3], 0.7, own.shape)
    if masked == "whole":
        seen = jnp.broadcast_to(jnp.arange(capacity) < slots[:, -1:, None] + 1, own.shape)
    return qkv, angles, (own | seen) if masked else None, *buffers, starts


def in_pages(buffer, table, pages):
    """A pool of this many pages that holds the rows of a contiguous buffer. In every other page all is NaN."""
    rows, heads, capacity, dim = buffer.shape
    tiles = buffer.reshape(rows, heads, capacity // kv.PAGE, kv.PAGE, dim).swapaxes(1, 2)
    return jnp.full((pages, heads, kv.PAGE, dim), jnp.nan, buffer.dtype).at[table].set(tiles)
