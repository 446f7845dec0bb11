"""Attention to the cache as one kernel for Hopper GPUs, in Pallas for Mosaic GPU.

The function is that of :mod:`specjax.models.fused_attention`, which is Pallas for Triton. JAX has deprecated Triton.
This kernel uses Hopper's own instructions: the copy engine brings tiles of 64 slots to shared memory ahead of their
use, and the matrix instruction reads the tiles there.

A program serves one row, one kv head and one part of the row's tiles. Part p of P parts owns the tiles p, p + P,
p + 2P and so on, so a short text in a large cache is shared by all parts too. An example with two parts:

    tiles in use    |  0  |  1  |  2  |  3  |  4  |      the block of new tokens begins in tile 4
    part 0             x           x           +         x: copied, multiplied, added to the sums
    part 1                   x           x               +: the same, after the block is put into the copy

    part 0, in time:   copies     block, 4, 2 | 0        a ring of ``slots`` tiles; a slot is filled again as soon as
                       sums       4   2   0              its product is done

- Tiles are added from the last to the first, so copies of old tiles are under way while the block is put into its own.
  That tile is copied as the others are, and the block's keys and values are copied beside it. The program turns the
  keys, puts keys and values into the tile, and copies each group of eight slots that holds a new entry back to the
  cache. So nothing is read from the cache that was written by the same call.
- A program keeps three sums for each query, as in the other module: ``top``, ``total`` and ``mixed``. ``top`` is in
  units of log2. With several parts a second kernel, "join", adds the sums of all parts in the order of the parts.
- A matrix instruction takes 64 rows. Row r is the token r % 8 of the head's query r // 8. The copy engine reads
  tokens that don't exist as zeros, and doesn't write them. The instruction's other rows hold garbage that nobody
  reads, because a row never meets another row.

Tiles lie at fixed slots and parts own fixed tiles. So the entries that a token sees are summed in one order, wherever
its block begins and whatever other rows do, and a cache in pages gives the same bits as a contiguous one.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.decode.arrays import span
from specjax.models import tuning
from specjax.models.cache import PAGE
from specjax.models.hopper_program import EIGHT, ROWS, Sizes, div, kernel, load, rem, scratch

# The default of JAX 0.11, inferred layouts, picks a wrong one for the block's entries.
_OPTIONS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


def attend(
    qkv: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    mask: jax.Array | None,
    keys: jax.Array,
    values: jax.Array,
    starts: jax.Array,
    table: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """:func:`specjax.models.attention.attend` as one kernel, or two for a large cache.

    In a group of eight slots that the block writes to, values of stale slots that aren't finite become 0.

    Args:
      qkv: bfloat16 or float16 [B, T, kv_heads, group + 2, D]: at most 8 tokens and 8 queries a kv head, D 64 or 128.
      angles: cos and sin, f32[B, T, D].
      mask: bool[B, T, S], the slots that each token sees; None: every slot up to the token's own.
      keys, values: [B, kv_heads, S, D] of ``qkv``'s dtype, where 8 divides S, or pools [P, kv_heads, PAGE, D] with a
        table.
      starts: i32[B], the slot of the block's first token.
      table: i32[B, W], the pages of each row; S is then W * PAGE. Entries past the end of the table are not written.

    Returns:
      [B, T, kv_heads * group * D], and both buffers with the block in them.
    """
    batch, block, kv_heads, width, dim = qkv.shape
    group, capacity = width - 2, keys.shape[2] if table is None else table.shape[1] * PAGE
    parts = parts_of(batch * kv_heads, capacity, dim)
    slots, tiles = slots_of(batch * kv_heads * parts, dim), pl.cdiv(capacity, PAGE)
    sizes = Sizes(block, group, dim, tiles, parts, slots, qkv.dtype)
    given, shapes = _of_rows(angles, mask, starts, table, sizes), _shapes(batch, kv_heads, sizes)
    attend_in_place = plgpu.kernel(
        partial(kernel, sizes=sizes, masked=mask is not None, paged=table is not None),
        out_type=shapes,
        scratch_types=scratch(sizes),
        grid=(batch, kv_heads, parts),
        grid_names=("row", "head", "part"),
        compiler_params=_OPTIONS,
        kernel_name="attend",
    )

    def run(refs):  # a kernel changes buffers in place only through references
        buffers, to = refs
        for ref, x in zip(to, attend_in_place(qkv, *given, *buffers), strict=True):
            ref[...] = x

    unset = [jnp.zeros(x.shape, x.dtype) for x in shapes]  # left out of the compiled program
    (keys, values), sums = pl.run_state(run)(((keys, values), unset))
    mixed = sums[0] if parts == 1 else _joined(sums[0], sums[1], sums[2], block, qkv.dtype)
    return mixed.reshape(batch, block, -1), keys, values


def _shapes(batch: int, kv_heads: int, sizes: Sizes) -> list[jax.ShapeDtypeStruct]:
    """What the kernel returns: the result of a single part, or each part's ``mixed``, ``top`` and ``total``."""
    block, group, dim = sizes.block, sizes.group, sizes.dim
    if sizes.parts == 1:
        return [jax.ShapeDtypeStruct((batch, block, kv_heads, group, dim), sizes.dtype)]
    tokens = block + (block * group * dim % 128 != 0)  # "join" takes 128 numbers at once
    of_parts = batch, kv_heads, sizes.parts
    mixed = jax.ShapeDtypeStruct((*of_parts, group, tokens, dim), jnp.float32)
    return [mixed] + [jax.ShapeDtypeStruct((*of_parts, ROWS), jnp.float32)] * 2


def parts_of(programs: int, capacity: int, dim: int) -> int:
    """How many parts a row's cache has: a power of two.

    A cache of at most 256 slots is a single part. Else a part has at least 128 slots, or 512 where rows alone make many
    programs.

    Args:
      programs: rows times kv heads.
      capacity: slots of a row.
      dim: of a head.
    """
    limit, least = 16 if dim == 128 else 32, 128 if programs <= tuning.FEW_KERNEL_PROGRAMS else 512
    most = min(limit, capacity // least, tuning.MOST_KERNEL_PROGRAMS // programs) if capacity > 256 else 1
    return 1 << (max(1, most).bit_length() - 1)


def slots_of(programs: int, dim: int) -> int:
    """How many tiles a program's ring holds: as many as fit when two programs share a multiprocessor, or one alone."""
    return (4 if 2 * programs <= tuning.MOST_KERNEL_PROGRAMS else 2) * (128 // dim)


def _of_rows(angles, mask, starts, table, sizes: Sizes) -> list[jax.Array]:
    """The arrays [B, ...] that the kernel reads beside the block, with the arguments of :func:`attend`."""
    batch, half = len(starts), sizes.dim // 2

    def padded(x, before: int, after: int):
        return jnp.pad(x, ((0, 0), (before, after), (0, 0)))

    # Both halves of a head have the same angles.
    turns = [jnp.broadcast_to(x[..., :half], (batch, sizes.block, half)) for x in angles]
    of_query = [jnp.tile(padded(x, 0, EIGHT - sizes.block), (1, sizes.group, 1)) for x in turns]
    of_queries = [padded(x, 0, ROWS - x.shape[1]) for x in of_query]  # f32[B, 64, D / 2], by the matrix's rows
    of_slots = [padded(x, PAGE, PAGE) for x in turns]  # a window of 64 holds the angles of a tile's slots
    given = [starts, *of_queries, *of_slots]
    if mask is not None:  # i32[B, S]: bit t says whether token t sees the slot
        bits = jnp.sum(mask.astype(jnp.int32) << span(sizes.block)[..., None], axis=1, dtype=jnp.int32)
        bits = jnp.broadcast_to(bits, (batch, bits.shape[1]))
        given.append(jnp.pad(bits, ((0, 0), (0, sizes.tiles * PAGE - bits.shape[1]))))
    return given if table is None else [*given, table]


def _joined(mixed: jax.Array, top: jax.Array, total: jax.Array, block: int, dtype) -> jax.Array:
    """Joins the sums of all parts, in the order of the parts.

    Args:
      mixed: f32[B, kv_heads, parts, group, T or T + 1, D].
      top, total: f32[B, kv_heads, parts, 64].
      block: T, tokens of the block.
      dtype: of the result.

    Returns:
      [B, T, kv_heads, group, D], the values mixed by a softmax over all slots.
    """
    batch, kv_heads, parts, group, tokens, dim = mixed.shape
    at_once = 128 // dim  # queries of a program: a number for each of its 128 threads

    def program(mixed_ref, top_ref, total_ref, out_ref, stage):
        row, head, chunk = (lax.axis_index(name) for name in ("row", "head", "chunk"))
        layout = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
        cells = pl.ds(chunk * 128, 128)
        vectors = [load(mixed_ref.at[row, head, part, cells], layout) for part in range(parts)]
        thread = plgpu.broadcasted_iota(jnp.int32, (128,), 0, layout=layout)
        queries = [chunk * at_once + i for i in range(at_once)]
        places = [(div(n, tokens), rem(n, tokens)) for n in queries]  # the query's number, its token
        shares = [_shares(top_ref.at[row, head], total_ref.at[row, head], i * EIGHT + t, parts) for i, t in places]
        out = plgpu.layout_cast(jnp.zeros((128,), jnp.float32), layout)
        for vector, *share in zip(vectors, *shares, strict=True):
            out += vector * (share[0] if at_once == 1 else jnp.where(thread < dim, *share))
        stage[...] = out.astype(dtype)
        plgpu.commit_smem()
        for n, (i, t) in enumerate(places):
            plgpu.copy_smem_to_gmem(stage.at[pl.ds(n * dim, dim)], out_ref.at[row, t, head, i], t < block)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        program,
        out_type=jax.ShapeDtypeStruct((batch, block, kv_heads, group, dim), dtype),
        scratch_types=[plgpu.SMEM((128,), dtype)],
        grid=(batch, kv_heads, group * tokens // at_once),
        grid_names=("row", "head", "chunk"),
        compiler_params=_OPTIONS,
        kernel_name="join",
    )(mixed.reshape(batch, kv_heads, parts, -1), top, total)


def _shares(top_ref, total_ref, n, parts: int) -> list[jax.Array]:
    """What each part's ``mixed`` counts in the result of row n."""
    tops = [top_ref[part, n] for part in range(parts)]
    highest = tops[0]
    for top in tops[1:]:
        highest = jnp.maximum(highest, top)
    shares = [jnp.exp2(top - highest) for top in tops]
    total = jnp.float32(0)
    for part, share in enumerate(shares):
        total += share * total_ref[part, n]
    return [share / total for share in shares]
