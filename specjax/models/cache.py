"""The preallocated key/value cache: per-row lengths, in-place block writes, rollback by a new length.

A row's entries at and past its length are stale: masked from attention and overwritten by the next write. So a
rollback moves no data. Axis 0 of every leaf is the row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.config import LlamaConfig


class KVCache(NamedTuple):
    """Keys and values of every layer."""

    keys: tuple[jax.Array, ...]  # per layer [B, kv_heads, S, head_dim]
    values: tuple[jax.Array, ...]  # per layer [B, kv_heads, S, head_dim]
    lengths: jax.Array  # i32[B] entries in use

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]


def alloc(config: LlamaConfig, batch: int, capacity: int, dtype) -> KVCache:
    """An empty cache. Zeros, not uninitialised memory: a masked entry still meets 0 * value, and 0 * NaN is NaN."""
    shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
    layers = range(config.num_hidden_layers)
    return KVCache(
        tuple(jnp.zeros(shape, dtype) for _ in layers),
        tuple(jnp.zeros(shape, dtype) for _ in layers),
        jnp.zeros(batch, jnp.int32),
    )


def write(buffer: jax.Array, block: jax.Array, starts: jax.Array) -> jax.Array:
    """Writes block[B, kv_heads, T, head_dim] into buffer[B, kv_heads, S, head_dim] at each row's own start i32[B].

    The caller guarantees starts + T <= S: past it ``dynamic_update_slice`` would clamp backwards over valid entries.
    """
    if buffer.shape[0] == 1:  # under vmap it lowers to a scatter, which costs a GPU two more kernels a layer
        return lax.dynamic_update_slice(buffer, block, (0, 0, starts[0], 0))
    return jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (0, start, 0)))(buffer, block, starts)


def with_lengths(cache: KVCache, lengths: jax.Array) -> KVCache:
    """Commits or rolls back to i32[B] lengths."""
    return cache._replace(lengths=lengths)


def nbytes(config: LlamaConfig, batch: int, capacity: int, dtype) -> int:
    """Bytes that :func:`alloc` takes on the device."""
    return sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(jax.eval_shape(lambda: alloc(config, batch, capacity, dtype)))
    )
