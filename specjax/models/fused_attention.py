"""Attention to the cache as one GPU kernel, in Pallas for Triton. XLA makes seven kernels of the same work.

The kernel's grid has one program for each row, each kv head and each part of the cache. A part is ``share`` tiles, and
a tile is 64 slots. Tiles lie at fixed slots. A small cache is a single part. A large cache is several parts, so that
more programs share the work (FlashDecoding, Dao et al. 2023). An example for one row and one kv head: a capacity of
1024 slots in four parts, 510 cached tokens, and a block of four tokens a, b, c, d that starts at slot 510.

    slots      0           256         512         768        1023
    parts      |  part 0   |  part 1   |  part 2   |  part 3   |    one program each, share = 4 tiles
    tiles      |0  1  2  3 |4  5  6  7 |8  9  10 11|12 13 14 15|    64 slots each
    in use     |###########|###########|#          |           |    slots 0 to 513, the block included
    writes        nothing       a b         c d       nothing
                 --------- barrier, inside each program ---------
    reads        tiles 0-3    tiles 4-7    tile 8     nothing
    returns      sums 0       sums 1       sums 2     nothing
                      +-----------+----------+
                                  _joined: softmax over all parts in use

- A program first writes those tokens of the block that belong to its own part, then reads its part. So a program reads
  old and new entries alike.
- The program of a part that the row does not reach, such as part 3, does nothing, so a cache may have many parts.
- No program reads or writes another program's part. Programs therefore never wait for each other. Inside one program
  the threads share the work, and a thread reads entries that other threads wrote: all wait at the barrier in between.
- Every program reads all queries of its kv head. The program keeps three sums for each query, over the entries of its
  part that the query sees: ``top`` = max(score), ``total`` = sum(exp(score - top)) and
  ``mixed`` = sum(exp(score - top) * value). Each further tile may raise ``top``, and fades the older sums by
  exp(old top - new top) (Milakov and Gimelshein 2018).
- With one part the result is ``mixed / total``, and the program divides. With several parts a second kernel, "join",
  fades these parts' sums to the highest ``top`` in the same way, adds them up, and divides. A part that a query sees
  nothing of has ``total`` = 0 and counts for nothing.

The cache may also be paged (:mod:`specjax.models.cache`). A page is a tile: tile i of row b is page ``table[b, i]`` of
the pool, and all else is as above, so the results have the same bits. Every program gets the whole pool of its kv head,
and writes only pages of its row and of its part. Rows may share pages that none of them writes.

Because tiles lie at fixed slots, the entries that a token sees are summed in one order, wherever the token's block
begins. So a text does not depend, to the last bit, on which of its tokens were drafted.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.decode.arrays import span
from specjax.models import tuning
from specjax.models.cache import PAGE

_FAR = -1e30  # stands for -inf, because -inf minus -inf is NaN


def attend(
    qkv: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    mask: jax.Array | None,
    keys: jax.Array,
    values: jax.Array,
    starts: jax.Array,
    table: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """:func:`specjax.models.attention.attend` as one kernel, or two for a large cache.

    Args:
      qkv: bfloat16 or float16 [B, T, kv_heads, group + 2, D]. D is a power of two, at least 32.
      angles: cos and sin, f32[B, T, D].
      mask: bool[B, T, S], the slots that each token sees; None: every slot up to the token's own.
      keys, values: [B, kv_heads, S, D] of ``qkv``'s dtype, or pools [P, kv_heads, PAGE, D] with a table.
      starts: i32[B], the slot of the block's first token.
      table: i32[B, W], the pages of each row; S is then W * PAGE. Entries past the end of the table are not written.
      interpret: whether Pallas interprets the kernel. Tests without a GPU do so.

    Returns:
      [B, T, kv_heads * group * D], and both buffers with the block in them.
    """
    batch, block, kv_heads, width, dim = qkv.shape
    capacity, group = keys.shape[2] if table is None else table.shape[1] * PAGE, width - 2
    parts = parts_of(batch * kv_heads, capacity)
    given = _of_rows(qkv, angles, mask, starts, table, capacity)
    rows = block * kv_heads * group
    sums = [jax.ShapeDtypeStruct((batch, parts, rows, dim), qkv.dtype if parts == 1 else jnp.float32)]
    sums += [jax.ShapeDtypeStruct((batch, parts, rows), jnp.float32)] * 2  # top and total
    share = pl.cdiv(pl.cdiv(capacity, PAGE), parts)
    sizes = dict(block=block, group=group, kv_heads=kv_heads, share=share, parts=parts)
    of_head = _of_head(keys, table)
    keys, values, mixed, top, total = pl.pallas_call(
        partial(_kernel, **sizes, masked=mask is not None, paged=table is not None, barrier=not interpret),
        grid=(batch, kv_heads, parts),
        in_specs=[*map(_of_row, given), of_head, of_head],
        out_specs=[of_head, of_head, *map(_of_part, sums)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values)] + sums,
        input_output_aliases={len(given): 0, len(given) + 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="attend",
    )(*given, keys, values)
    if parts > 1:
        mixed = _joined((mixed, top, total), starts, block, share * PAGE, qkv.dtype, interpret)
    return mixed.reshape(batch, block, -1), keys, values


def _of_rows(qkv, angles, mask, starts, table, capacity: int) -> list[jax.Array]:
    """The arrays [B, ...] that the kernel reads beside keys and values, with the arguments of :func:`attend`."""
    batch, block, kv_heads, width, dim = qkv.shape
    vectors = qkv.reshape(batch, block * kv_heads * width, dim)
    # Both halves of a head have the same angles. One array of cosines and sines is made by one kernel of XLA, not two.
    cos, sin = angles
    turns = jnp.broadcast_to(jnp.where(span(dim)[None] < dim // 2, cos, sin), (batch, block, dim))
    masks = [] if mask is None else [jnp.broadcast_to(mask.astype(jnp.int8), (batch, block, capacity))]
    return [starts, vectors, turns, *masks, *([] if table is None else [table])]


def _of_head(buffer, table) -> pl.BlockSpec:
    """A program gets its kv head of its row of a contiguous buffer [B, kv_heads, S, D], or of a whole pool."""
    size, _, slots, dim = buffer.shape
    if table is None:
        return pl.BlockSpec((None, None, slots, dim), lambda b, head, part: (b, head, 0, 0))
    return pl.BlockSpec((size, None, slots, dim), lambda b, head, part: (0, head, 0, 0))


def _of_row(x) -> pl.BlockSpec:
    """A program gets its row of an array [B, ...]."""
    return pl.BlockSpec((None, *x.shape[1:]), lambda b, head, part: (b, *(0 for _ in x.shape[1:])))


def _of_part(x) -> pl.BlockSpec:
    """A program gets its part of its row of an array [B, parts, ...]."""
    return pl.BlockSpec((None, None, *x.shape[2:]), lambda b, head, part: (b, part, *(0 for _ in x.shape[2:])))


def parts_of(programs: int, capacity: int) -> int:
    """How many parts a row's cache has: a power of two, at most 16.

    A part has at least 256 slots, and a cache of at most 512 slots is a single part. A cache is cut as far as all
    programs together are at most ``tuning.MOST_KERNEL_PROGRAMS``, two for each multiprocessor of the GPU. However many
    rows there are, a part of a long cache has about ``tuning.LONG_PART`` slots: one long row must not hold up others.

    Args:
      programs: rows times kv heads.
      capacity: slots of a row.
    """
    if capacity <= 512:
        return 1
    most = max(tuning.MOST_KERNEL_PROGRAMS // programs, capacity // tuning.LONG_PART)
    return 1 << (max(1, min(16, capacity // 256, most)).bit_length() - 1)


def _joined(sums: tuple, starts: jax.Array, block: int, slots: int, dtype, interpret: bool) -> jax.Array:
    """Joins the sums of all parts in use.

    Args:
      sums: mixed f32[B, parts, N, D], top f32[B, parts, N] and total f32[B, parts, N].
      starts: i32[B], the slot of the block's first token. Parts past the block hold no sums.
      block: tokens of the block.
      slots: slots of a part.
      dtype: of the result.
      interpret: whether Pallas interprets the kernel.

    Returns:
      [B, N, D], the values mixed by a softmax over all slots.
    """
    batch, parts, rows, dim = sums[0].shape

    def kernel(mixed_ref, top_ref, total_ref, start_ref, out_ref):
        part, column = (lax.broadcasted_iota(jnp.int32, x, len(x) - 1) for x in ((parts,), (parts, dim)))
        has_sums = part * slots < start_ref[...] + block
        top = plgpu.load(top_ref.at[part], mask=has_sums, other=_FAR)
        total = plgpu.load(total_ref.at[part], mask=has_sums, other=0.0)
        cells = jnp.broadcast_to(part[:, None], column.shape), column
        mixed = plgpu.load(mixed_ref.at[cells], mask=jnp.broadcast_to(has_sums[:, None], column.shape), other=0.0)
        share = jnp.exp(top - jnp.max(top))  # [parts]
        out_ref[...] = (jnp.sum(mixed * share[:, None], axis=0) / jnp.sum(total * share)).astype(dtype)

    def of_row(*ends: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, parts, None, *ends), lambda b, n: (b, 0, n, *(0 for _ in ends)))

    return pl.pallas_call(
        kernel,
        grid=(batch, rows),
        in_specs=[of_row(dim), of_row(), of_row(), pl.BlockSpec((None,), lambda b, n: (b,))],
        out_specs=pl.BlockSpec((None, None, dim), lambda b, n: (b, n, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, rows, dim), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=1),
        interpret=interpret,
        name="join",
    )(*sums, starts)


class _Inputs(NamedTuple):
    """One row's block, in references that the kernel reads."""

    # [block * kv_heads * (group + 2), D] Token by token, and in each token kv head by kv head: the head's ``group``
    # queries, its key, its value. All are not yet rotated.
    qkv: Any
    # f32[block, D] The cosine of each token's D / 2 angles, then their sine.
    turns: Any

    def rotated(self, vectors: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Vectors i32[N] of ``qkv``, rotated by the angles of tokens i32[N]. -> the two halves, each [N, D / 2]."""
        half, dtype = self.qkv.shape[-1] // 2, self.qkv.dtype
        first = self.qkv[_cells(vectors, 0, half)].astype(jnp.float32)
        second = self.qkv[_cells(vectors, half, half)].astype(jnp.float32)
        cos, sin = self.turns[_cells(tokens, 0, half)], self.turns[_cells(tokens, half, half)]
        return (first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype)


class _Cache(NamedTuple):
    """The cache of one row and one kv head, in references that the kernel reads and writes."""

    # [S, D] The keys, after rotation. If paged: [P, PAGE, D], the pages of all rows.
    keys: Any
    # The values, in a reference of the same shape.
    values: Any
    # i32[W] The row's pages, in order. None: the cache is contiguous.
    table: Any

    def tile(self, i: jax.Array) -> tuple:
        """The index of tile i in ``keys`` and ``values``."""
        return (pl.ds(i * PAGE, PAGE),) if self.table is None else (self.table[i], slice(None))

    def cells(self, start: jax.Array, slots: int, first: int, count: int) -> tuple:
        """The index of ``count`` columns, from column ``first`` on, in each of the slots from ``start`` on.

        For slots past the end of the table it names some cells of the last page.
        """
        if self.table is None:
            return pl.ds(start, slots), pl.ds(first, count)
        slot = start + lax.broadcasted_iota(jnp.int32, (slots,), 0)
        page = self.table[jnp.minimum(slot // PAGE, self.table.shape[0] - 1)]
        places, columns = _cells(slot % PAGE, first, count)
        return jnp.broadcast_to(page[:, None], columns.shape), places, columns


def _kernel(start_ref, qkv_ref, turns_ref, *refs, masked, paged, block, group, kv_heads, share, parts, barrier):
    """The program of one row, one kv head and one part: the picture at the top of this file."""
    mask_ref, refs = (refs[0], refs[1:]) if masked else (None, refs)
    table_ref, refs = (refs[0], refs[1:]) if paged else (None, refs)
    _, _, keys_ref, values_ref, mixed_ref, top_ref, total_ref = refs
    cache = _Cache(keys_ref, values_ref, table_ref)
    head, part = pl.program_id(1), pl.program_id(2)
    start, dim, inputs = start_ref[...], qkv_ref.shape[-1], _Inputs(qkv_ref, turns_ref)
    token_size, head_vector = kv_heads * (group + 2), head * (group + 2)  # a token's vectors; the first of this head
    first, last = part * share, (part + 1) * share  # the tiles of this part: first to last - 1
    if table_ref is not None:
        last = jnp.minimum(last, table_ref.shape[0])  # there is no tile past the end of the table

    tiles_in_use = pl.cdiv(start + block, PAGE)

    @pl.when(first < tiles_in_use)  # the row may be too short for this part
    def attend_part():
        _write_block(inputs, cache, start, block, group, token_size, head_vector, (first, last))
        if barrier:  # an interpreted program has no threads that could wait
            plgpu.debug_barrier()

        # The queries of this head, token by token. A matrix unit takes at least 16 rows, so padding follows them.
        n = lax.broadcasted_iota(jnp.int32, (max(16, pl.next_power_of_2(block * group)),), 0)
        token = jnp.minimum(n // group, block - 1)
        queries = inputs.rotated(token * token_size + head_vector + n % group, token)

        def add_tile(i, sums):
            slots, tile = i * PAGE + lax.broadcasted_iota(jnp.int32, (PAGE,), 0), cache.tile(i)
            in_use = (slots < start + block)[:, None]  # bool[M, 1]
            seen = _seen(mask_ref, slots, token, start, block)  # bool[N, M]
            return _with_tile(sums, queries, cache, tile, in_use, seen)

        sums = jnp.zeros((len(n), dim), jnp.float32), jnp.full((len(n),), _FAR), jnp.zeros((len(n),), jnp.float32)
        mixed, top, total = lax.fori_loop(first, jnp.minimum(last, tiles_in_use), add_tile, sums)
        is_query = n < block * group
        out_row = n // group * (kv_heads * group) + head * group + n % group  # of padding, past the end
        mixed = mixed / total[:, None] if parts == 1 else mixed
        plgpu.store(mixed_ref.at[_cells(out_row, 0, dim)], mixed.astype(mixed_ref.dtype), mask=is_query[:, None])
        plgpu.store(top_ref.at[out_row], top, mask=is_query)
        plgpu.store(total_ref.at[out_row], total, mask=is_query)


def _write_block(
    inputs: _Inputs, cache: _Cache, start, block: int, group: int, token_size: int, head_vector, part: tuple
) -> None:
    """Writes the keys and values of those tokens of the block whose slots lie in this part.

    Args:
      inputs: the row's block.
      cache: the cache of this row and kv head.
      start: i32[], the slot of the block's first token.
      block: tokens of the block.
      group: queries of a kv head.
      token_size: vectors of a token in ``inputs.qkv``.
      head_vector: i32[], the first vector of this head among a token's vectors. The queries come first, then the key.
      part: the first tile of this part, and the first tile after it.
    """
    dim, (first, last) = inputs.qkv.shape[-1], part
    j = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(block),), 0)  # tokens of the block, and padding
    token = jnp.minimum(j, block - 1)
    key, slot = token * token_size + head_vector + group, start + j
    in_part = (j < block) & (slot >= first * PAGE) & (slot < last * PAGE)
    store = partial(plgpu.store, mask=in_part[:, None])
    for column, k in zip((0, dim // 2), inputs.rotated(key, token), strict=True):
        cells = cache.cells(start, len(j), column, dim // 2)
        v = inputs.qkv[_cells(key + 1, column, dim // 2)]
        finite = jnp.abs(v.astype(jnp.float32)) < jnp.inf  # as in specjax.models.cache.finite_values
        store(cache.keys.at[cells], jnp.where(finite, k, jnp.nan))
        store(cache.values.at[cells], jnp.where(finite, v, 0))


def _with_tile(sums: tuple, queries: tuple, cache: _Cache, tile: tuple, in_use: jax.Array, seen: jax.Array) -> tuple:
    """The sums of N queries after one more tile of M slots.

    Args:
      sums: mixed f32[N, D], top f32[N] and total f32[N].
      queries: the two halves of the rotated queries, each [N, D / 2].
      cache: the cache of this row and kv head.
      tile: the tile's index in the cache.
      in_use: bool[M, 1], which slots hold entries. The other slots are not read.
      seen: bool[N, M], which slots each query sees.

    Returns:
      The new sums.
    """
    mixed, top, total = sums
    (q_low, q_high), dim = queries, cache.keys.shape[-1]
    low, high = pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)
    load = partial(plgpu.load, mask=in_use, other=0.0)
    dot = partial(jnp.dot, preferred_element_type=jnp.float32)
    scores = dot(q_low, load(cache.keys.at[*tile, low]).T) + dot(q_high, load(cache.keys.at[*tile, high]).T)  # [N, M]
    scores = jnp.where(seen, scores * dim**-0.5, _FAR)
    higher = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = jnp.where(seen, jnp.exp(scores - higher[:, None]), 0.0)
    fade = jnp.exp(top - higher)
    mixed = mixed * fade[:, None] + dot(weights.astype(q_low.dtype), load(cache.values.at[*tile, :]))
    return mixed, higher, total * fade + jnp.sum(weights, axis=1)


def _seen(mask_ref, slots: jax.Array, token: jax.Array, start: jax.Array, block: int) -> jax.Array:
    """Which of the slots i32[M] each query sees. ``token`` i32[N] is the query's token in the block. -> bool[N, M]."""
    shape = len(token), len(slots)
    slots, token = jnp.broadcast_to(slots[None], shape), jnp.broadcast_to(token[:, None], shape)
    if mask_ref is None:
        return slots <= start + token
    return plgpu.load(mask_ref.at[token, slots], mask=slots < start + block, other=0) != 0


def _cells(rows: jax.Array, first: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Indices of ``count`` columns, from column ``first`` on, in each of the rows i32[N]."""
    columns = first + lax.broadcasted_iota(jnp.int32, (len(rows), count), 1)
    return jnp.broadcast_to(rows[:, None], columns.shape), columns
