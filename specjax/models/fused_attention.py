"""Attention to the cache as one GPU kernel, in Pallas for Triton: what XLA makes seven of.

A program has one row and one kv head, and reads what of their cache is in use, not all of it. A large cache is cut
among several programs, whose sums are joined after (FlashDecoding, Dao et al. 2023; sums with a running maximum are
those of Milakov and Gimelshein 2018). The block's own keys and values come from where the products left them: none
waits for a write. Tiles lie at fixed slots, so what a token sees is summed in one order wherever its block begins: a
text doesn't depend, to the last bit, on which of its tokens were drafted.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_FAR = -1e30  # in place of -inf, of which differences are no numbers


def attend(
    qkv: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    mask: jax.Array | None,
    keys: jax.Array,
    values: jax.Array,
    starts: jax.Array,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """:func:`specjax.models.attention.attend`, for 16-bit types and a ``D`` that is a power of two from 32 on."""
    batch, block, kv_heads, width, dim = qkv.shape
    capacity, group = keys.shape[2], width - 2
    parts = parts_of(batch * kv_heads, capacity)
    tile, stages = (128, 2) if parts == 1 else (64, 3)
    vectors = qkv.reshape(batch, block * kv_heads * width, dim)
    # Both halves of a head turn by the same.
    cos, sin = (jnp.broadcast_to(x[..., : dim // 2], (batch, block, dim // 2)) for x in angles)
    given = [starts, vectors, cos, sin]
    given += [] if mask is None else [jnp.broadcast_to(mask.astype(jnp.int8), (batch, block, capacity))]
    rows = block * kv_heads * group
    sums = [jax.ShapeDtypeStruct((batch, parts, rows, dim), qkv.dtype if parts == 1 else jnp.float32)]
    sums += [jax.ShapeDtypeStruct((batch, parts, rows), jnp.float32)] * 2  # maximum and total

    def of_row(x) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda b, head, part: (b, *(0 for _ in x.shape[1:])))

    def of_part(x) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *x.shape[2:]), lambda b, head, part: (b, part, *(0 for _ in x.shape[2:])))

    of_head = pl.BlockSpec((None, None, capacity, dim), lambda b, head, part: (b, head, 0, 0))
    keys, values, mixed, top, total = pl.pallas_call(
        partial(
            _kernel, masked=mask is not None, block=block, group=group, kv_heads=kv_heads, tile=tile,
            share=pl.cdiv(pl.cdiv(capacity, tile), parts), parts=parts,
        ),  # fmt: skip
        grid=(batch, kv_heads, parts),
        in_specs=[*map(of_row, given), of_head, of_head],
        out_specs=[of_head, of_head, *map(of_part, sums)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values)] + sums,
        input_output_aliases={len(given): 0, len(given) + 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=stages),
        interpret=interpret,
        name="attend",
    )(*given, keys, values)
    if parts > 1:
        share = jnp.exp(top - jnp.max(top, axis=1, keepdims=True))[..., None]  # [B, parts, N, 1]
        mixed = jnp.sum(mixed * share, axis=1) / jnp.sum(total[..., None] * share, axis=1)
    return mixed.astype(qkv.dtype).reshape(batch, block, -1), keys, values


def parts_of(programs: int, capacity: int) -> int:
    """Programs that share a row's cache: one for each 256 entries, but no more in all than two for a multiprocessor."""
    return 1 if capacity <= 512 else max(1, min(16, capacity // 256, 264 // programs))


def _kernel(start_ref, qkv_ref, cos_ref, sin_ref, *refs, masked, block, group, kv_heads, tile, share, parts):
    mask_ref, refs = (refs[0], refs[1:]) if masked else (None, refs)
    _, _, keys_ref, values_ref, mixed_ref, top_ref, total_ref = refs
    head, part = pl.program_id(1), pl.program_id(2)
    start, dtype, dim = start_ref[...], qkv_ref.dtype, qkv_ref.shape[-1]
    low, high = pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)
    queries = _padded(block * group)
    token_size, own_vectors = kv_heads * (group + 2), head * (group + 2)  # a token's vectors; this head's first

    def rotated(vectors, tokens):
        """Vectors of qkv at their tokens' angles, as two halves [N, D / 2]."""
        first = qkv_ref[_cells(vectors, 0, dim // 2)].astype(jnp.float32)
        second = qkv_ref[_cells(vectors, dim // 2, dim // 2)].astype(jnp.float32)
        cos, sin = cos_ref[_cells(tokens, 0, dim // 2)], sin_ref[_cells(tokens, 0, dim // 2)]
        return (first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype)

    n = lax.broadcasted_iota(jnp.int32, (queries,), 0)  # token by token, each of this head's group
    token = jnp.minimum(n // group, block - 1)
    q_low, q_high = rotated(token * token_size + own_vectors + n % group, token)

    def seen(slots):
        """bool[N, M] which of the slots each query sees."""
        slots = jnp.broadcast_to(slots[None], (queries, len(slots)))
        own = jnp.broadcast_to(token[:, None], slots.shape)
        if mask_ref is None:
            return slots <= start + own
        return plgpu.load(mask_ref.at[own, slots], mask=slots < start + block, other=0) != 0

    def cached(i):
        """Tile i of the cache as it was: keys as two halves and values, 0 from the block's first slot on."""
        there, at = i * tile + lax.broadcasted_iota(jnp.int32, (tile, 1), 0) < start, pl.ds(i * tile, tile)
        load = partial(plgpu.load, mask=there, other=0.0)
        return load(keys_ref.at[at, low]), load(keys_ref.at[at, high]), load(values_ref.at[at, :])

    def brought(j):
        """The keys and values of the block's tokens j i32[M], where there are such."""
        tokens = jnp.clip(j, 0, block - 1)
        vector = tokens * token_size + own_vectors + group
        return *rotated(vector, tokens), qkv_ref[_cells(vector + 1, 0, dim)]

    def added(i, sums, k_low, k_high, v):
        """The sums with tile i in them."""
        mixed, top, total = sums
        see = seen(i * tile + lax.broadcasted_iota(jnp.int32, (tile,), 0))
        dot = partial(jnp.dot, preferred_element_type=jnp.float32)
        scores = (dot(q_low, k_low.T) + dot(q_high, k_high.T)) * dim**-0.5  # [N, M]
        scores = jnp.where(see, scores, _FAR)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.where(see, jnp.exp(scores - higher[:, None]), 0.0)
        fade = jnp.exp(top - higher)
        mixed = mixed * fade[:, None] + dot(weights.astype(dtype), v)
        return mixed, higher, total * fade + jnp.sum(weights, axis=1)

    def old(i, sums):
        return added(i, sums, *cached(i))

    def edge(i, sums):
        j = i * tile + lax.broadcasted_iota(jnp.int32, (tile,), 0) - start
        fresh = ((j >= 0) & (j < block))[:, None]
        return added(i, sums, *(jnp.where(fresh, new, old) for new, old in zip(brought(j), cached(i), strict=True)))

    def write():
        j = lax.broadcasted_iota(jnp.int32, (_padded(block),), 0)
        store, at = partial(plgpu.store, mask=(j < block)[:, None]), pl.ds(start, len(j))
        for ref, place, new in zip((keys_ref, keys_ref, values_ref), (low, high, slice(None)), brought(j), strict=True):
            store(ref.at[at, place], new)

    sums = jnp.zeros((queries, dim), jnp.float32), jnp.full((queries,), _FAR), jnp.zeros((queries,), jnp.float32)
    first, last = part * share, (part + 1) * share  # tiles of this program, which others never read from
    whole, used = start // tile, pl.cdiv(start + block, tile)  # those before the block's, and all in use
    sums = lax.fori_loop(first, jnp.minimum(last, whole), old, sums)
    for i in (whole, whole + 1):  # a block is no longer than a tile; a loop would be given memory to read ahead
        mine = (i >= first) & (i < jnp.minimum(last, used))
        sums = lax.cond(mine, partial(edge, i), lambda sums: sums, sums)
    mixed, top, total = sums
    write() if parts == 1 else pl.when(part == 0)(write)
    live = n < block * group
    at = n // group * (kv_heads * group) + head * group + n % group  # past the end for what is padding
    mixed = mixed / total[:, None] if parts == 1 else mixed
    plgpu.store(mixed_ref.at[_cells(at, 0, dim)], mixed.astype(mixed_ref.dtype), mask=live[:, None])
    plgpu.store(top_ref.at[at], top, mask=live)
    plgpu.store(total_ref.at[at], total, mask=live)


def _padded(size: int) -> int:
    """The least power of two from 16 on that holds ``size``: what a matrix unit takes."""
    return max(16, 1 << (size - 1).bit_length())


def _cells(rows: jax.Array, first: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Indices of ``count`` columns from ``first`` on, of each of rows i32[N]."""
    columns = first + lax.broadcasted_iota(jnp.int32, (len(rows), count), 1)
    return jnp.broadcast_to(rows[:, None], columns.shape), columns
