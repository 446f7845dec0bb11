"""Attention to the cache as one GPU kernel, in Pallas for Triton: what XLA makes seven of.

A program has one row and one kv head, and reads what of their cache is in use, not all of it. A large cache is cut
among several programs, whose sums are joined after (FlashDecoding, Dao et al. 2023; sums with a running maximum are
those of Milakov and Gimelshein 2018). A program first writes what of the block belongs to its part, so that it then
reads old and new entries alike. Tiles lie at fixed slots, so what a token sees is summed in one order wherever its
block begins: a text doesn't depend, to the last bit, on which of its tokens were drafted.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.models import tuning

_FAR = -1e30  # in place of -inf, of which differences are no numbers
_TILE = 64  # cache entries read at once


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
            _kernel, masked=mask is not None, block=block, group=group, kv_heads=kv_heads,
            share=pl.cdiv(pl.cdiv(capacity, _TILE), parts), parts=parts, barrier=not interpret,
        ),  # fmt: skip
        grid=(batch, kv_heads, parts),
        in_specs=[*map(of_row, given), of_head, of_head],
        out_specs=[of_head, of_head, *map(of_part, sums)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values)] + sums,
        input_output_aliases={len(given): 0, len(given) + 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="attend",
    )(*given, keys, values)
    if parts > 1:
        mixed = _joined(mixed, top, total, qkv.dtype, interpret)
    return mixed.reshape(batch, block, -1), keys, values


def parts_of(programs: int, capacity: int) -> int:
    """Programs that share a row's cache, a power of two: one for each 256 entries or more, but no more in all than two
    for a multiprocessor."""
    most = 1 if capacity <= 512 else max(1, min(16, capacity // 256, tuning.MOST_KERNEL_PROGRAMS // programs))
    return 1 << (most.bit_length() - 1)


def _joined(mixed: jax.Array, top: jax.Array, total: jax.Array, dtype, interpret: bool) -> jax.Array:
    """Softmax over all parts from sums f32[B, parts, N, D], maxima and totals f32[B, parts, N]. -> [B, N, D]."""
    batch, parts, rows, dim = mixed.shape

    def kernel(mixed_ref, top_ref, total_ref, out_ref):
        share = jnp.exp(top_ref[...] - jnp.max(top_ref[...]))  # [parts]
        out = jnp.sum(mixed_ref[...] * share[:, None], axis=0) / jnp.sum(total_ref[...] * share)
        out_ref[...] = out.astype(dtype)

    def of_row(*ends: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, parts, None, *ends), lambda b, n: (b, 0, n, *(0 for _ in ends)))

    return pl.pallas_call(
        kernel,
        grid=(batch, rows),
        in_specs=[of_row(dim), of_row(), of_row()],
        out_specs=pl.BlockSpec((None, None, dim), lambda b, n: (b, n, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, rows, dim), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=1),
        interpret=interpret,
        name="join",
    )(mixed, top, total)


def _kernel(start_ref, qkv_ref, cos_ref, sin_ref, *refs, masked, block, group, kv_heads, share, parts, barrier):
    mask_ref, refs = (refs[0], refs[1:]) if masked else (None, refs)
    _, _, keys_ref, values_ref, mixed_ref, top_ref, total_ref = refs
    head, part = pl.program_id(1), pl.program_id(2)
    start, dtype, dim = start_ref[...], qkv_ref.dtype, qkv_ref.shape[-1]
    low, high = pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)
    token_size, own_vectors = kv_heads * (group + 2), head * (group + 2)  # a token's vectors; this head's first
    first, last = part * share, (part + 1) * share  # tiles of this program, which others neither read nor write

    def rotated(vectors, tokens):
        """Vectors of qkv at their tokens' angles, as two halves [N, D / 2]."""
        first = qkv_ref[_cells(vectors, 0, dim // 2)].astype(jnp.float32)
        second = qkv_ref[_cells(vectors, dim // 2, dim // 2)].astype(jnp.float32)
        cos, sin = cos_ref[_cells(tokens, 0, dim // 2)], sin_ref[_cells(tokens, 0, dim // 2)]
        return (first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype)

    j = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(block),), 0)  # tokens of the block, and padding
    token = jnp.minimum(j, block - 1)
    key, slot = token * token_size + own_vectors + group, start + j
    mine = (j < block) & (slot >= first * _TILE) & (slot < last * _TILE)
    store, at = partial(plgpu.store, mask=mine[:, None]), pl.ds(start, len(j))
    for part_of_head, first_column, k in zip((low, high), (0, dim // 2), rotated(key, token), strict=True):
        v = qkv_ref[_cells(key + 1, first_column, dim // 2)]
        finite = jnp.abs(v.astype(jnp.float32)) < jnp.inf  # specjax.models.cache.finite_values
        store(keys_ref.at[at, part_of_head], jnp.where(finite, k, jnp.nan))
        store(values_ref.at[at, part_of_head], jnp.where(finite, v, 0))
    if barrier:  # a program's threads read what others of them wrote; interpreted, there are none
        plgpu.debug_barrier()

    n = lax.broadcasted_iota(jnp.int32, (max(16, pl.next_power_of_2(block * group)),), 0)  # a matrix unit takes 16
    token = jnp.minimum(n // group, block - 1)  # of query n: token by token, each of this head's group
    q_low, q_high = rotated(token * token_size + own_vectors + n % group, token)

    def added(i, sums):
        """The sums with tile i in them."""
        mixed, top, total = sums
        slots, at = i * _TILE + lax.broadcasted_iota(jnp.int32, (_TILE,), 0), pl.ds(i * _TILE, _TILE)
        load = partial(plgpu.load, mask=(slots < start + block)[:, None], other=0.0)
        see = _seen(mask_ref, slots, token, start, block)
        dot = partial(jnp.dot, preferred_element_type=jnp.float32)
        scores = dot(q_low, load(keys_ref.at[at, low]).T) + dot(q_high, load(keys_ref.at[at, high]).T)  # [N, M]
        scores = jnp.where(see, scores * dim**-0.5, _FAR)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.where(see, jnp.exp(scores - higher[:, None]), 0.0)
        fade = jnp.exp(top - higher)
        mixed = mixed * fade[:, None] + dot(weights.astype(dtype), load(values_ref.at[at, :]))
        return mixed, higher, total * fade + jnp.sum(weights, axis=1)

    sums = jnp.zeros((len(n), dim), jnp.float32), jnp.full((len(n),), _FAR), jnp.zeros((len(n),), jnp.float32)
    used = pl.cdiv(start + block, _TILE)
    mixed, top, total = lax.fori_loop(first, jnp.minimum(last, used), added, sums)
    live = n < block * group
    at = n // group * (kv_heads * group) + head * group + n % group  # past the end for what is padding
    mixed = mixed / total[:, None] if parts == 1 else mixed
    plgpu.store(mixed_ref.at[_cells(at, 0, dim)], mixed.astype(mixed_ref.dtype), mask=live[:, None])
    plgpu.store(top_ref.at[at], top, mask=live)
    plgpu.store(total_ref.at[at], total, mask=live)


def _seen(mask_ref, slots: jax.Array, token: jax.Array, start: jax.Array, block: int) -> jax.Array:
    """Which of the slots i32[M] each query sees, by its token i32[N] in the block. -> bool[N, M]."""
    shape = len(token), len(slots)
    slots, token = jnp.broadcast_to(slots[None], shape), jnp.broadcast_to(token[:, None], shape)
    if mask_ref is None:
        return slots <= start + token
    return plgpu.load(mask_ref.at[token, slots], mask=slots < start + block, other=0) != 0


def _cells(rows: jax.Array, first: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Indices of ``count`` columns from ``first`` on, of each of rows i32[N]."""
    columns = first + lax.broadcasted_iota(jnp.int32, (len(rows), count), 1)
    return jnp.broadcast_to(rows[:, None], columns.shape), columns
