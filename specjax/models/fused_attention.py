"""Attention to the cache as one GPU kernel, in Pallas for Triton: what XLA makes seven of.

A program has one row and one kv head, and reads what of their cache is in use, not all of it. A long cache is cut among
several programs, whose sums are joined after (FlashDecoding, Dao et al. 2023; sums with a running maximum are those of
Milakov and Gimelshein 2018). The block's own keys and values come from where the products left them: none waits for a
write.
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
    cos, sin = (x[..., : dim // 2] for x in angles)  # both halves of a head turn by the same
    given = [starts, vectors, cos, sin] + ([] if mask is None else [mask.astype(jnp.int8)])
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
            _kernel, masked=mask is not None, block=block, group=group, kv_heads=kv_heads, tile=tile, parts=parts
        ),
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


def _kernel(start_ref, qkv_ref, cos_ref, sin_ref, *refs, masked, block, group, kv_heads, tile, parts):
    mask_ref, refs = (refs[0], refs[1:]) if masked else (None, refs)
    _, _, keys_ref, values_ref, mixed_ref, top_ref, total_ref = refs
    head, part = pl.program_id(1), pl.program_id(2)
    start, dtype, dim = start_ref[...], qkv_ref.dtype, qkv_ref.shape[-1]
    low, high = pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)
    queries, fresh = _padded(block * group), _padded(block)
    token_size, own = kv_heads * (group + 2), head * (group + 2)  # in vectors: a token's, and where this head's are

    def rotated(vectors, tokens):
        """Vectors of qkv at their tokens' angles, as two halves [N, D / 2]."""
        first = qkv_ref[_cells(vectors, 0, dim // 2)].astype(jnp.float32)
        second = qkv_ref[_cells(vectors, dim // 2, dim // 2)].astype(jnp.float32)
        cos, sin = cos_ref[_cells(tokens, 0, dim // 2)], sin_ref[_cells(tokens, 0, dim // 2)]
        return (first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype)

    n = lax.broadcasted_iota(jnp.int32, (queries,), 0)  # token by token, each of this head's group
    token = jnp.minimum(n // group, block - 1)
    q_low, q_high = rotated(token * token_size + own + n % group, token)

    def seen(slots, there):
        """bool[N, M] which of the slots that are there each query sees; all of them without a mask."""
        there = jnp.broadcast_to(there[None], (queries, len(slots)))
        if mask_ref is None:
            return there
        at = jnp.broadcast_to(token[:, None], there.shape), jnp.broadcast_to(slots[None], there.shape)
        return plgpu.load(mask_ref.at[at], mask=there, other=0) != 0

    def added(sums, k_low, k_high, v, see):
        """The sums with M more entries in them."""
        mixed, top, total = sums
        dot = partial(jnp.dot, preferred_element_type=jnp.float32)
        scores = (dot(q_low, k_low.T) + dot(q_high, k_high.T)) * dim**-0.5  # [N, M]
        scores = jnp.where(see, scores, _FAR)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.where(see, jnp.exp(scores - higher[:, None]), 0.0)
        fade = jnp.exp(top - higher)
        mixed = mixed * fade[:, None] + dot(weights.astype(dtype), v)
        return mixed, higher, total * fade + jnp.sum(weights, axis=1)

    def old(i, sums):
        slots = i * tile + lax.broadcasted_iota(jnp.int32, (tile,), 0)
        there, at = slots < start, pl.ds(i * tile, tile)
        load = partial(plgpu.load, mask=there[:, None], other=0.0)
        k_low, k_high, v = load(keys_ref.at[at, low]), load(keys_ref.at[at, high]), load(values_ref.at[at, :])
        return added(sums, k_low, k_high, v, seen(slots, there))

    def new(sums):
        j = lax.broadcasted_iota(jnp.int32, (fresh,), 0)
        there, tokens = j < block, jnp.minimum(j, block - 1)
        vector = tokens * token_size + own + group
        k_low, k_high = rotated(vector, tokens)
        v = qkv_ref[_cells(vector + 1, 0, dim)]
        store, at = partial(plgpu.store, mask=there[:, None]), pl.ds(start, fresh)
        store(keys_ref.at[at, low], k_low)
        store(keys_ref.at[at, high], k_high)
        store(values_ref.at[at, :], v)
        see = seen(start + j, there)
        return added(sums, k_low, k_high, v, see if masked else see & (j[None] <= token[:, None]))

    sums = jnp.zeros((queries, dim), jnp.float32), jnp.full((queries,), _FAR), jnp.zeros((queries,), jnp.float32)
    tiles = pl.cdiv(start, tile)
    each = pl.cdiv(tiles, parts)
    sums = lax.fori_loop(part * each, jnp.minimum((part + 1) * each, tiles), old, sums)
    # The last part has the least of the old entries, and so takes the new.
    sums = new(sums) if parts == 1 else lax.cond(part == parts - 1, new, lambda sums: sums, sums)
    mixed, top, total = sums
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
