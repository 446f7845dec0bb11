"""The preallocated key/value cache: per-row lengths, in-place block writes, rollback by a new length.

Keys and values are stored as arrays, or as int8 codes with a scale for each head of each token. Only the functions of
this file know which; the model and the loop don't.

A row's entries at and past its length are stale: attention masks them, and the next write overwrites them. So a
rollback moves no data.

A cache is contiguous or paged. In a contiguous cache each row owns S slots, and axis 0 of every leaf is the row. In a
paged cache (Kwon et al. 2023, PagedAttention) all rows share one pool of pages, and a row's table names its pages:

    table of row b:    [ 7, 3, 9, 0 ]        slot 130 of row b is slot 130 - 2 * 64 = 2 of page 9
    pool:              page 0, page 1, ...   a page holds PAGE = 64 slots

Page 0 is the null page; on a mesh whose parts share the rows, each part has its own, the first of its pages, which the
part's rows name 0 too. Rows that own no page at some place of their table have a 0 there. What is written to the null
page is never read unmasked. A slot past the end of the table is a slot of the null page.

A model with an encoder has one cache too. The slots of a row's source hold keys and values of the decoder's
cross-attention, and the slots after them those of its self-attention. So slots are places in the row's tokens, as ever.

Attention multiplies the value of a masked entry by 0, and 0 * NaN is NaN. Therefore every value in a cache is finite
(:func:`finite_values`), and a masked entry never counts. The check costs little: a call checks only the few tokens that
it writes.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from specjax.models.axes import DATA, fitted, parts
from specjax.models.configs import ModelConfig
from specjax.models.quantized import Quantized, quantize

Buffer = jax.Array | Quantized  # [B, kv_heads, S, head_dim], or a pool [P, kv_heads, PAGE, head_dim]

PAGE = 64  # slots of a page. The attention kernel reads as many slots at once.


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "lengths", "table", "source"],
    meta_fields=["sharding"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of every layer."""

    # [B, kv_heads, S, head_dim] for each layer: the keys, after rotation. If paged: [P, kv_heads, PAGE, head_dim].
    keys: tuple[Buffer, ...]
    # The values, in arrays of the same shapes.
    values: tuple[Buffer, ...]
    # i32[B] How many entries of each row are in use.
    lengths: jax.Array
    # How keys and values lie on a mesh; static. None: on one device.
    sharding: NamedSharding | None = None
    # i32[B, W] The pages of each row, in order. None: the cache is contiguous.
    table: jax.Array | None = None
    # i32[B] How many tokens each row's source has, 0 before an encoder has read it. Their slots hold what the decoder's
    # cross-attention reads. None: the model has no encoder.
    source: jax.Array | None = None

    @property
    def capacity(self) -> int:
        """S, the slots of each row."""
        return self.keys[0].shape[2] if self.table is None else self.table.shape[1] * PAGE

    @property
    def first(self) -> jax.Array:
        """i32[B] The first slot of each row that a call of the model may write: 0, or the slot after the source."""
        return jnp.zeros_like(self.lengths) if self.source is None else self.source

    def last_start(self, size: int) -> int:
        """The last slot at which a block of ``size`` entries may start.

        In a paged cache that is any slot: entries past the end of the table go to the null page.
        """
        return self.capacity - size if self.table is None else self.capacity

    def replace(self, **changes: Any) -> "KVCache":
        """The same cache with other fields."""
        return dataclasses.replace(self, **changes)


def alloc(
    config: ModelConfig, batch: int, capacity: int, dtype, sharding: NamedSharding | None = None
) -> KVCache:
    """An empty cache. It is filled with zeros, because uninitialised memory could hold NaN.

    Args:
      config: the model's shape.
      batch: the number of rows.
      capacity: S, the slots of each row.
      dtype: the dtype of keys and values. int8 stores codes, with a float32 scale for each head of each token.
      sharding: how keys and values lie on a mesh; None: on the default device.

    Raises:
      ValueError: the sharding cuts keys and values along another axis than their heads.
    """
    if sharding is not None and (len(sharding.spec) > 2 or {*sharding.spec[:1]} - {None, DATA}):
        raise ValueError(
            f"keys and values [B, kv_heads, S, D] are cut as {sharding.spec}, expected by kv heads, by rows over an "
            'axis "data", or not at all: specjax.parallel.cache_sharding(mesh) makes such a sharding'
        )
    shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
    where = sharding and fitted(sharding, batch)

    def zeros(_) -> Buffer:
        codes = jnp.zeros(shape, dtype, device=where)
        if codes.dtype != jnp.int8:
            return codes
        return Quantized(codes, jnp.zeros(shape[:-1], jnp.float32, device=where))

    layers = range(config.num_hidden_layers)
    lengths = jnp.zeros(batch, jnp.int32)
    source = jnp.zeros(batch, jnp.int32) if config.start_ids else None
    return KVCache(tuple(map(zeros, layers)), tuple(map(zeros, layers)), lengths, sharding, source=source)


def paged(cache: KVCache, rows: int, pages: int) -> KVCache:
    """An empty paged cache for the same model as a contiguous one. Every table holds null pages alone.

    Args:
      cache: a contiguous cache of at least one row. Only its shapes are read, so shapes alone will do.
      rows: B.
      pages: P, the pages of the pool, the null page included.
    """
    width, where = -(-cache.capacity // PAGE), cache.sharding and fitted(cache.sharding, pages)

    def pool(x) -> jax.Array:
        return jnp.zeros((pages, x.shape[1], PAGE, *x.shape[3:]), x.dtype, device=where)

    keys, values = jax.tree.map(pool, (cache.keys, cache.values))
    lengths, table = jnp.zeros(rows, jnp.int32), jnp.zeros((rows, width), jnp.int32)
    source = None if cache.source is None else jnp.zeros(rows, jnp.int32)
    return KVCache(keys, values, lengths, cache.sharding, table, source)


def room(entries: int) -> int:
    """A capacity for at least this number of entries. Beyond 256 it is a multiple of 128, as for requests.

    On a GPU, XLA's products copy a whole cache of any other length into one that is padded to such a multiple.
    """
    return entries if entries <= 256 else -(-entries // 128) * 128


def finite_values(keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [..., head_dim] in the form in which a cache may hold them.

    A value that is NaN or infinite becomes 0, and the key's element at the same place becomes NaN. A query that sees
    the entry then gets a NaN score, and so a NaN result, as it would from the original value. For a query that doesn't
    see the entry, the score is masked.
    """
    finite = jnp.isfinite(values)
    return jnp.where(finite, keys, jnp.nan), jnp.where(finite, values, 0)


def write(buffer: Buffer, block: jax.Array, starts: jax.Array, table: jax.Array | None = None) -> Buffer:
    """Writes block[B, kv_heads, T, head_dim] into the buffer at each row's own start i32[B].

    The caller guarantees starts + T <= S for a contiguous buffer. Otherwise ``dynamic_update_slice`` would move the
    block back, over valid entries.

    Args:
      buffer: keys or values of one layer.
      block: the new entries.
      starts: the slot of each row's first new entry.
      table: the cache's table.
    """
    new = quantize(block, "int8") if isinstance(buffer, Quantized) else block.astype(buffer.dtype)
    return _place(buffer, new, starts, table)


def by_rows(buffer: Buffer, table: jax.Array | None) -> Buffer:
    """Every row's entries in the order of their slots, [B, kv_heads, S, ...]. A contiguous buffer is given as it is."""
    if table is None:
        return buffer
    rows, width = table.shape

    def row_major(pool):  # [P, kv_heads, PAGE, ...]
        taken = pool[table].swapaxes(1, 2)  # [B, kv_heads, W, PAGE, ...]
        return taken.reshape(rows, pool.shape[1], width * PAGE, *pool.shape[3:])

    return jax.tree.map(row_major, buffer)


def own_pages(table: jax.Array, pool: Buffer) -> jax.Array:
    """The pages i32[B, W] of a table as a device counts them that holds the given part of the pool.

    The parts of a mesh share the pool evenly, and a row's pages lie on the row's part. The first page of each part is a
    null page. So the null page of a table, which is 0, is that of any part.
    """
    return table % pool.shape[0]


def move(cache: KVCache, slots: jax.Array, starts: jax.Array) -> KVCache:
    """Copies every layer's entries at slots i32[B, T] to the slots from starts i32[B] on. Codes are copied as codes."""
    if cache.sharding is None or parts(cache.sharding.mesh) == 1:
        return _moved(cache, slots, starts)
    sharding = cache.sharding if cache.table is not None else fitted(cache.sharding, len(starts))
    rows = PartitionSpec(*sharding.spec[:1])
    specs = cache.replace(
        keys=sharding.spec, values=sharding.spec, lengths=rows, table=None if cache.table is None else rows
    )

    def own(cache: KVCache, slots: jax.Array, starts: jax.Array) -> tuple:
        if cache.table is not None:
            cache = cache.replace(table=own_pages(cache.table, cache.keys[0]))
        new = _moved(cache, slots, starts)
        return new.keys, new.values

    moved = jax.shard_map(own, mesh=sharding.mesh, in_specs=(specs, rows, rows), out_specs=sharding.spec)
    keys, values = moved(cache, slots, starts)
    return cache.replace(keys=keys, values=values)


def _moved(cache: KVCache, slots: jax.Array, starts: jax.Array) -> KVCache:
    """:func:`move`, where all pages are at hand."""

    def taken(buffer):  # [B, kv_heads, T, ...]
        if cache.table is None:
            return jax.vmap(lambda row, row_slots: row[:, row_slots])(buffer, slots)
        pages, places = _pages_of(cache.table, slots)
        return buffer[pages, :, places].swapaxes(1, 2)

    def moved(buffer: Buffer) -> Buffer:
        return _place(buffer, jax.tree.map(taken, buffer), starts, cache.table)

    return cache.replace(keys=tuple(map(moved, cache.keys)), values=tuple(map(moved, cache.values)))


def _pages_of(table: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The pages of slots i32[B, T], and their places in these pages. -> i32[B, T] twice."""
    pages = jnp.take_along_axis(table, slots // PAGE, axis=1, mode="fill", fill_value=0)
    return pages, slots % PAGE


def _place(buffer: Buffer, new: Buffer, starts: jax.Array, table: jax.Array | None) -> Buffer:
    """The buffer with T new entries in each row, from the row's start i32[B] on."""

    def row(old, new, start):
        return lax.dynamic_update_slice_in_dim(old, new, start, axis=1)

    def rows(old, new):
        if table is not None:
            pages, places = _pages_of(table, starts[:, None] + jnp.arange(new.shape[2], dtype=jnp.int32))
            return old.at[pages, :, places].set(new.swapaxes(1, 2))
        if len(starts) == 1:  # vmap makes a scatter of it, which costs a GPU two more kernels per layer
            return row(old[0], new[0], starts[0])[None]
        return jax.vmap(row)(old, new, starts)

    return jax.tree.map(rows, buffer, new)


def scores(q: jax.Array, keys: Buffer) -> jax.Array:
    """Scalar products of queries q[B, kv_heads, M, head_dim] and cached keys. -> f32[B, kv_heads, M, S]."""
    if isinstance(keys, Quantized):
        return scores(q, keys.values.astype(q.dtype)) * keys.scale[:, :, None]
    full = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    return jnp.einsum("bkmd,bksd->bkms", q, keys, precision=full, preferred_element_type=jnp.float32)


def mixture(weights: jax.Array, values: Buffer, dtype) -> jax.Array:
    """Sums of cached values, weighted by f32[B, kv_heads, M, S]. -> [B, kv_heads, M, head_dim] as ``dtype``."""
    if isinstance(values, Quantized):
        return mixture(weights * values.scale[:, :, None], values.values.astype(dtype), dtype)
    full = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    # Sums are accumulated in float32 even so. XLA's CPU backend can't return float32 from a bfloat16 product.
    return jnp.einsum("bkms,bksd->bkmd", weights.astype(dtype), values, precision=full, preferred_element_type=dtype)


def with_lengths(cache: KVCache, lengths: jax.Array) -> KVCache:
    """The cache with lengths i32[B]. Greater lengths commit entries, smaller ones roll back."""
    return cache.replace(lengths=lengths)
