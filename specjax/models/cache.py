"""The preallocated key/value cache: per-row lengths, in-place block writes, rollback by a new length.

Keys and values are arrays, or codes with a scale for each head of each token (int8): the functions here know which, the
model and the loop don't.

A row's entries at and past its length are stale: masked from attention and overwritten by the next write. So a
rollback moves no data. Axis 0 of every leaf is the row.

A masked entry still meets 0 * value, and 0 * NaN is NaN. So the values in a cache are finite, always
(:func:`finite_values`): what is masked never counts, and no call pays for that but by the few tokens it writes.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from specjax.models.config import LlamaConfig
from specjax.models.quantized import Quantized, quantize

Buffer = jax.Array | Quantized  # [B, kv_heads, S, head_dim]


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "values", "lengths"], meta_fields=["sharding"])
@dataclasses.dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of every layer."""

    keys: tuple[Buffer, ...]  # per layer [B, kv_heads, S, head_dim]
    values: tuple[Buffer, ...]  # per layer [B, kv_heads, S, head_dim]
    lengths: jax.Array  # i32[B] entries in use
    sharding: NamedSharding | None = None  # how keys and values lie on a mesh, static; None: on one device

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]

    def replace(self, **changes: Any) -> "KVCache":
        """The same cache with other fields."""
        return dataclasses.replace(self, **changes)


def alloc(
    config: LlamaConfig, batch: int, capacity: int, dtype, sharding: NamedSharding | None = None
) -> KVCache:
    """An empty cache. Zeros, not uninitialised memory, which could hold NaN.

    Args:
      config: the model's shape.
      batch: rows.
      capacity: entries a row.
      dtype: of keys and values; int8 stores codes, with a float32 scale for each head of each token.
      sharding: of keys and values; None: the default device.

    Raises:
      ValueError: the sharding cuts keys and values along anything but their heads.
    """
    if sharding is not None and (len(sharding.spec) > 2 or any(sharding.spec[:1])):
        raise ValueError(
            f"keys and values [B, kv_heads, S, D] are cut as {sharding.spec}, expected by kv heads alone or not at "
            "all: specjax.parallel.cache_sharding(mesh) makes that"
        )
    shape = (batch, config.num_key_value_heads, capacity, config.head_dim)

    def zeros(_) -> Buffer:
        codes = jnp.zeros(shape, dtype, device=sharding)
        if codes.dtype != jnp.int8:
            return codes
        return Quantized(codes, jnp.zeros(shape[:-1], jnp.float32, device=sharding))

    layers = range(config.num_hidden_layers)
    lengths = jnp.zeros(batch, jnp.int32)
    return KVCache(tuple(map(zeros, layers)), tuple(map(zeros, layers)), lengths, sharding)


def room(entries: int) -> int:
    """A capacity for at least so many: beyond 256 entries a multiple of 128, like the capacities of requests.

    XLA's products on a GPU copy a cache of another length, whole, into one that is padded so.
    """
    return entries if entries <= 256 else -(-entries // 128) * 128


def finite_values(keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [..., head_dim] as they may be written to a cache.

    A value that is NaN or infinite becomes 0, and NaN marks the key in its place: who sees the entry gets a score that
    is NaN, and so no numbers, as from the value itself. Who doesn't see the entry has that score masked.
    """
    finite = jnp.isfinite(values)
    return jnp.where(finite, keys, jnp.nan), jnp.where(finite, values, 0)


def write(buffer: Buffer, block: jax.Array, starts: jax.Array) -> Buffer:
    """Writes block[B, kv_heads, T, head_dim] into buffer[B, kv_heads, S, head_dim] at each row's own start i32[B].

    The caller guarantees starts + T <= S: past it ``dynamic_update_slice`` would clamp backwards over valid entries.
    """
    new = quantize(block, "int8") if isinstance(buffer, Quantized) else block.astype(buffer.dtype)
    return _place(buffer, new, starts)


def move(cache: KVCache, slots: jax.Array, starts: jax.Array) -> KVCache:
    """Copies every layer's entries at slots i32[B, T] to starts i32[B] and on, in place and as they are stored."""

    def moved(buffer: Buffer) -> Buffer:
        return _place(buffer, jax.tree.map(lambda x: jax.vmap(lambda row, at: row[:, at])(x, slots), buffer), starts)

    return cache.replace(keys=tuple(map(moved, cache.keys)), values=tuple(map(moved, cache.values)))


def _place(buffer: Buffer, new: Buffer, starts: jax.Array) -> Buffer:
    def row(old, new, start):
        return lax.dynamic_update_slice_in_dim(old, new, start, axis=1)

    def rows(old, new):
        if len(starts) == 1:  # under vmap it lowers to a scatter, which costs a GPU two more kernels a layer
            return row(old[0], new[0], starts[0])[None]
        return jax.vmap(row)(old, new, starts)

    return jax.tree.map(rows, buffer, new)


def scores(q: jax.Array, keys: Buffer) -> jax.Array:
    """Products of queries q[B, kv_heads, M, head_dim] with the cached keys. -> f32[B, kv_heads, M, S]."""
    if isinstance(keys, Quantized):
        return scores(q, keys.values.astype(q.dtype)) * keys.scale[:, :, None]
    full = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    return jnp.einsum("bkmd,bksd->bkms", q, keys, precision=full, preferred_element_type=jnp.float32)


def mixture(weights: jax.Array, values: Buffer, dtype) -> jax.Array:
    """Sums of the cached values by weights f32[B, kv_heads, M, S]. -> [B, kv_heads, M, head_dim] as ``dtype``."""
    if isinstance(values, Quantized):
        return mixture(weights * values.scale[:, :, None], values.values.astype(dtype), dtype)
    full = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    # Accumulated in float32 all the same; asking for a float32 result is what XLA's CPU backend can't run in bf16.
    return jnp.einsum("bkms,bksd->bkmd", weights.astype(dtype), values, precision=full, preferred_element_type=dtype)


def with_lengths(cache: KVCache, lengths: jax.Array) -> KVCache:
    """Commits or rolls back to i32[B] lengths."""
    return cache.replace(lengths=lengths)
