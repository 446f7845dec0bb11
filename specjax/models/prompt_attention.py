"""Attention of a prompt's chunk to the cache as one kernel of a Hopper GPU, in Pallas for Mosaic GPU.

XLA writes the scores of a chunk, f32[B, heads, T, S], to memory and reads them several times. The kernel keeps the
scores on the chip (FlashAttention, Dao et al. 2022), reads pages where they lie, and stops at the last slot that its
queries see. XLA always computes the whole room S.

A *tile* is 64 queries of one head. A *step* is 128 slots of the cache, two pages. A program has two tiles that share a
kv head, one for each of its two mixing warpgroups, and a third warpgroup that loads. An example for a chunk of 128
tokens that starts at slot 384, with two parts:

    slots                   0      128     256     384     512
    steps                   |   0   |   1   |   2   |   3   |
    tile 0, tokens 0-63     |#######|#######|#######|##\\    |      # all slots are seen, without a mask
    tile 1, tokens 64-127   |#######|#######|#######|#####\\ |      \\ the diagonal, with a mask
    parts                   |    part 0     |    part 1     |      one program each

    loads       | step 0 | step 1 |        | step 2 |        |     a ring of two steps in shared memory: a step is
    mixes            | step 0 | step 1          | step 2 |          loaded as soon as both warpgroups leave its place

- Each query keeps three sums, as in :mod:`specjax.models.fused_attention`: ``top``, ``total`` and ``mixed``. Scores are
  scaled by log2(e), because the card has an instruction for 2^x.
- If rows, kv heads and tiles make too few programs for the card, the steps up to the chunk's end are cut into equal
  parts (FlashDecoding, Dao et al. 2023). XLA joins the parts by the logarithms of their totals.
- The number of parts follows from the shapes. The bounds of the parts follow from the row's own start. So a row's bits
  depend on no other row, and pages give the same bits as a contiguous cache.
- The chunk's own entries are written to the cache before the kernel runs. The kernel writes nothing but its result.
"""

import math
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.models import tuning
from specjax.models.attention import Block, rotated
from specjax.models.cache import PAGE

TILE = 64  # queries of one head: the rows of a matrix product of a warpgroup
STEP = 2 * PAGE  # slots that are mixed at once
MIXERS = 2  # warpgroups that mix
PLACES = 2  # steps of the ring. More don't fit into shared memory, with heads of 128 numbers.

_FAR = -1e30  # stands for -inf, because -inf minus -inf is NaN


def attend(
    qkv: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    mask: None,
    keys: jax.Array,
    values: jax.Array,
    starts: jax.Array,
    table: jax.Array | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """:func:`specjax.models.attention.attend` for the chunk of a prompt.

    Args:
      qkv: bfloat16 or float16 [B, T, kv_heads, group + 2, D]. T is a multiple of ``TILE``, and D is 64 or 128.
      angles: cos and sin, f32[B, T, D].
      mask: None: each token sees every slot up to its own.
      keys, values: [B, kv_heads, S, D] of ``qkv``'s dtype, where S is a multiple of ``PAGE``; or pools
        [P, kv_heads, PAGE, D] with a table.
      starts: i32[B], the slot of the chunk's first token.
      table: i32[B, W], the pages of each row; S is then W * PAGE.
      interpret: whether Pallas interprets the kernel. Tests without a GPU do so.

    Returns:
      [B, T, kv_heads * group * D], and both buffers with the chunk in them.
    """
    del mask
    queries, *cache = rotated(qkv, Block(starts, angles, None, None, table), keys, values)
    keys, values = cast(list[jax.Array], cache)
    return _mixed(queries, keys, values, starts, table, interpret).reshape(*qkv.shape[:2], -1), keys, values


def parts_of(programs: int, slots: int) -> int:
    """How many parts the steps of a chunk have: at most 16, and a part has at least 512 of the cache's slots.

    Args:
      programs: rows times kv heads times pairs of tiles.
      slots: S.
    """
    return max(1, min(16, slots // 512, tuning.MOST_PROMPT_PROGRAMS // programs))


class _Sizes(NamedTuple):
    """What is known when the kernel is compiled."""

    tokens: int  # T
    group: int  # query heads of a kv head
    tiles: int  # tiles of a kv head, in the order of their tokens, and of these in the order of their heads
    parts: int
    pages: int  # W, pages of a row
    interpret: bool  # an interpreted kernel has no registers, so some instructions are replaced


def _mixed(queries, keys, values, starts, table, interpret) -> jax.Array:
    """Queries [B, T, kv_heads, group, D] and the cache -> [B, T, heads, D]."""
    batch, size, kv_heads, group, dim = queries.shape
    heads, dtype = kv_heads * group, queries.dtype
    slots = keys.shape[2] if table is None else table.shape[1] * PAGE
    tiles = size // TILE * group
    pairs = pl.cdiv(tiles, MIXERS)
    parts = parts_of(batch * kv_heads * pairs, slots)
    swizzled = partial(plgpu.SMEM, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
    ring = swizzled((PLACES, STEP, dim), dtype)
    full = plgpu.Barrier(num_arrivals=STEP // PAGE, num_barriers=PLACES)
    free = plgpu.Barrier(num_arrivals=MIXERS, num_barriers=PLACES)
    kernel = plgpu.kernel(
        partial(_kernel, _Sizes(size, group, tiles, parts, slots // PAGE, bool(interpret)), table is not None),
        out_type=[
            jax.ShapeDtypeStruct((batch, parts, size, heads, dim), dtype if parts == 1 else jnp.float32),
            jax.ShapeDtypeStruct((batch, parts, heads, size), jnp.float32),
        ],
        scratch_types=[
            _Ring(ring, full, free),
            _Ring(ring, full, free),
            swizzled((MIXERS, TILE, dim), dtype),
            plgpu.SMEM((MIXERS, TILE), jnp.float32),
            plgpu.Barrier(num_barriers=MIXERS),
            plgpu.Barrier(num_arrivals=MIXERS),
        ],
        grid=(batch, kv_heads, pairs, parts),
        grid_names=("row", "head", "pair", "part"),
        num_threads=MIXERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    tables = [] if table is None else [table]
    out, logs = kernel(starts, *tables, queries.reshape(batch, size, heads, dim), keys, values)
    return out[:, 0] if parts == 1 else _joined(out, logs, dtype)


def _joined(out: jax.Array, logs: jax.Array, dtype) -> jax.Array:
    """Joins f32[B, parts, T, heads, D] by the logarithms f32[B, parts, heads, T] of the totals. -> [B, T, heads, D]."""
    shares = jnp.exp2(logs - jnp.max(logs, axis=1, keepdims=True))
    shares = (shares / jnp.sum(shares, axis=1, keepdims=True)).swapaxes(2, 3)[..., None]
    return jnp.sum(out * shares, axis=1).astype(dtype)


class _Ring(NamedTuple):
    """The keys or the values of some steps in shared memory."""

    entries: Any  # [PLACES, STEP, D]
    full: Any  # a barrier for each place: both pages have come
    free: Any  # a barrier for each place: all mixing warpgroups have left the place


class _Work(NamedTuple):
    """What the program's warpgroups do together."""

    row: jax.Array
    head: jax.Array  # the kv head
    first: jax.Array  # the first step of the part
    steps: jax.Array  # how many steps are mixed: those of the part up to the diagonal


def _kernel(sizes: _Sizes, paged: bool, start_ref, *refs):
    """The program of one row, one kv head, two tiles and one part: the picture at the top of this file."""
    table_ref, refs = (refs[0], refs[1:]) if paged else (None, refs)
    query_ref, key_ref, value_ref, out_ref, log_ref, keys, values, tiles, logs, arrived, turn = refs
    row, head, pair, part, me = map(lax.axis_index, ("row", "head", "pair", "part", "warpgroup"))
    start = start_ref[row]

    def tile(warpgroup) -> tuple[jax.Array, jax.Array]:
        """The first token of a warpgroup's tile, and the tile's head. Of an odd number the last tile is made twice."""
        index = jnp.minimum(pair * MIXERS + warpgroup, sizes.tiles - 1)
        return lax.div(index, sizes.group) * TILE, head * sizes.group + lax.rem(index, sizes.group)

    share = pl.cdiv(pl.cdiv(start + sizes.tokens, STEP), sizes.parts)
    end = pl.cdiv(start + tile(MIXERS - 1)[0] + TILE, STEP)  # the first step that no query of the program sees
    first = part * share
    work = _Work(row, head, first, jnp.maximum(jnp.minimum(first + share, end) - first, 0))
    unmasked = jnp.clip(lax.div(start + tile(0)[0] + 1, STEP) - first, 0, work.steps)

    @pl.when(me == MIXERS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        _load(sizes, work, table_ref, (key_ref, keys), (value_ref, values))

    @pl.when(me < MIXERS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        token, query_head = tile(me)
        mine = row, pl.ds(token, TILE), query_head
        plgpu.copy_gmem_to_smem(query_ref.at[mine], tiles.at[me], arrived.at[me])
        plgpu.barrier_wait(arrived.at[me])
        step = partial(_step, sizes, work, tiles.at[me], keys, values, turn, start + token)
        mixed, log = _mix(sizes, step, me, unmasked, work.steps, turn, query_ref.shape[-1])
        result = out_ref.at[row, part, pl.ds(token, TILE), query_head]
        logs[me] = log
        if sizes.parts == 1:
            tiles[me] = mixed.astype(out_ref.dtype)
        else:
            result[...] = mixed
        plgpu.commit_smem()
        if sizes.parts == 1:
            plgpu.copy_smem_to_gmem(tiles.at[me], result)
        plgpu.copy_smem_to_gmem(logs.at[me], log_ref.at[row, part, query_head, pl.ds(token, TILE)])
        plgpu.wait_smem_to_gmem(0)


def _load(sizes: _Sizes, work: _Work, table_ref, *buffers: tuple[Any, _Ring]) -> None:
    """Loads the keys and values of all steps, each step as soon as its place in the ring is free."""

    def load(i, _):
        pages: list[Any] = []
        place = lax.rem(i, PLACES)
        for n in range(STEP // PAGE):  # a page past the row's last one would hold slots that no query sees
            page = jnp.minimum((work.first + i) * (STEP // PAGE) + n, sizes.pages - 1)
            in_row = work.row, work.head, pl.ds(page * PAGE, PAGE)
            pages.append(in_row if table_ref is None else (table_ref[work.row, page], work.head))
        for ref, ring in buffers:

            @pl.when(i >= PLACES)
            def _(ring=ring):
                plgpu.barrier_wait(ring.free.at[place])

            for n, page in enumerate(pages):
                part = ring.entries.at[place, pl.ds(n * PAGE, PAGE)]
                plgpu.copy_gmem_to_smem(ref.at[page], part, ring.full.at[place])
        return None

    lax.fori_loop(0, work.steps, load, None)
    for place in range(PLACES):  # who waits at a barrier must see all of its phases

        @pl.when(place < work.steps)
        def _(place=place):
            for _, ring in buffers:
                plgpu.barrier_wait(ring.free.at[place])


def _mix(sizes: _Sizes, step, me, unmasked, steps, turn, dim: int) -> tuple[jax.Array, jax.Array]:
    """All steps of one tile. -> f32[TILE, D], the mixed values, and f32[TILE], log2 of the totals.

    The two mixing warpgroups take turns: while one makes its softmax, the tensor cores make the products of the other
    (FlashAttention-3, Shah et al. 2024, section 3.1).
    """
    in_registers = (lambda x, layout: x) if sizes.interpret else plgpu.layout_cast
    per_query = plgpu.Layout.WGMMA.reduce(1)
    sums = (
        in_registers(jnp.zeros((TILE, dim), jnp.float32), plgpu.Layout.WGMMA),
        in_registers(jnp.full(TILE, _FAR, jnp.float32), per_query),
        in_registers(jnp.zeros(TILE, jnp.float32), per_query),
    )
    pl.when(me == 1)(partial(_pass_turn, turn))
    sums = lax.fori_loop(0, unmasked, partial(step, masked=False), sums)
    mixed, top, total = lax.fori_loop(unmasked, steps, partial(step, masked=True), sums)
    pl.when(me == 0)(partial(_pass_turn, turn))
    total = jnp.maximum(total, 1e-30)  # 0 in a part of which a query sees nothing
    return mixed / lax.broadcast_in_dim(total, mixed.shape, [0]), top + jnp.log(total) * math.log2(math.e)


def _pass_turn(turn) -> None:
    """Waits until the other mixing warpgroup passes its turn too."""
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(turn)


def _step(sizes, work, tile, keys: _Ring, values: _Ring, turn, first_slot, i, sums, masked: bool) -> tuple:
    """The sums of a tile's queries after step ``i`` of the part.

    Args:
      sizes, work: as in the kernel.
      tile: the queries [TILE, D] in shared memory.
      keys, values: the rings.
      turn: the barrier at which the mixing warpgroups take turns.
      first_slot: i32[], the own slot of the tile's first query.
      i: i32[], the step's number in the part.
      sums: mixed f32[TILE, D], top f32[TILE] and total f32[TILE].
      masked: whether some query may not see all slots of the step.
    """
    (mixed, top, total), place = sums, lax.rem(i, PLACES)
    scale = tile.shape[-1] ** -0.5 * math.log2(math.e)
    plgpu.barrier_wait(keys.full.at[place])
    scores = _product(sizes, tile, keys.entries.at[place], True, lambda: _pass_turn(turn))
    plgpu.barrier_arrive(keys.free.at[place])
    if masked:
        iota = lax.broadcasted_iota if sizes.interpret else partial(plgpu.broadcasted_iota, layout=plgpu.Layout.WGMMA)
        query, slot = (iota(jnp.int32, scores.shape, axis) for axis in (0, 1))
        scores = jnp.where((work.first + i) * STEP + slot <= first_slot + query, scores, -jnp.inf)
    higher = jnp.maximum(top, scores.max(axis=1) * scale)
    weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(higher, scores.shape, [0]))
    fade = jnp.exp2(top - higher)
    total = total * fade + weights.sum(axis=1)
    weights = weights.astype(tile.dtype)
    higher, total, fade, weights = lax.optimization_barrier((higher, total, fade, weights))  # the softmax ends here
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(values.full.at[place])
    plgpu.barrier_wait(turn)
    more = _product(sizes, weights, values.entries.at[place], False)
    plgpu.barrier_arrive(values.free.at[place])
    return mixed * lax.broadcast_in_dim(fade, mixed.shape, [0]) + more, higher, total


def _product(sizes: _Sizes, a, b, transposed: bool, meanwhile=lambda: None) -> jax.Array:
    """f32[M, N], the product of [M, K], in registers or shared memory, and [K, N] or its transpose in shared memory."""
    if sizes.interpret:  # Pallas can't interpret all operands of the instruction
        meanwhile()
        return jnp.dot(a[...], b[...].T if transposed else b[...], preferred_element_type=jnp.float32)

    def scope(sums):
        plgpu.wgmma(sums, a, b.transpose((1, 0)) if transposed else b)
        meanwhile()
        return sums[...]

    return pl.run_scoped(scope, plgpu.ACC((a.shape[0], b.shape[not transposed]), jnp.float32))
