"""The program of :mod:`specjax.models.hopper_attention`: one row, one kv head and one part of the row's tiles."""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.models.cache import PAGE

ROWS = 64  # of a matrix instruction
EIGHT = 8  # rows that lie together in shared memory; a head's query has so many places for tokens
_FAR = -1e30  # stands for -inf, because -inf minus -inf is NaN
_LAYOUT = plgpu.Layout.WGMMA  # how a matrix instruction spreads a matrix over the threads


class Sizes(NamedTuple):
    """Static numbers of a call."""

    block: int  # tokens of the block
    group: int  # queries of a kv head
    dim: int
    tiles: int  # of a row's cache
    parts: int
    slots: int  # tiles that the ring holds
    dtype: Any


def scratch(sizes: Sizes) -> list:
    """Shared memory and barriers of a program. Queries, then values, then the sums lie at the same place."""
    dim, dtype = sizes.dim, sizes.dtype
    by_halves = plgpu.TilingTransform((EIGHT, dim // 2)), plgpu.SwizzleTransform(dim)
    ring = plgpu.SMEM((sizes.slots, PAGE, dim), dtype, transforms=by_halves)
    queries = sums = plgpu.SMEM((ROWS, dim), dtype, transforms=by_halves)
    if sizes.parts > 1:
        by_lines = plgpu.TilingTransform((EIGHT, 32)), plgpu.SwizzleTransform(128)
        sums = plgpu.SMEM((ROWS, dim), jnp.float32, transforms=by_lines)
    block = plgpu.SMEM((2, EIGHT + PAGE + EIGHT, dim), dtype)  # keys and values at their places in the tile
    full = plgpu.Barrier(num_barriers=sizes.slots)
    arrived = [plgpu.Barrier(num_arrivals=sizes.group), plgpu.Barrier(num_arrivals=2)]  # queries; the block
    return [ring, plgpu.RefUnion([ring], [queries], [sums]), block, full, full, *arrived]


def kernel(qkv_ref, starts_ref, *refs, sizes: Sizes, masked: bool, paged: bool) -> None:
    """The program of one row, one kv head and one part: the picture at the top of this file."""
    angles, refs = refs[:4], refs[4:]
    bits_ref, refs = (refs[0], refs[1:]) if masked else (None, refs)
    table_ref, refs = (refs[0], refs[1:]) if paged else (None, refs)
    *caches, out_ref = refs[:3]
    keys, union, block, keys_full, values_full, queries_arrived, block_arrived = refs[-7:]
    (values,), (vectors,), (stage,) = union
    row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
    tokens = pl.ds(rem(part, 1), EIGHT)  # from 0 on. Not a constant, because Pallas refuses constants out of bounds
    places = [pl.ds(i * EIGHT, EIGHT) for i in range(sizes.group)]
    for i, place in enumerate(places):
        plgpu.copy_gmem_to_smem(qkv_ref.at[row, tokens, head, i], vectors.at[place], queries_arrived)
    start = starts_ref[row]

    def tiles_before(tile):  # how many of the part's tiles lie before a tile
        tile = jnp.minimum(tile, sizes.tiles)
        return div(jnp.maximum(tile - part + (sizes.parts - 1), 0), sizes.parts)

    count = tiles_before(div(start + (sizes.block + PAGE - 1), PAGE))
    of_block = count - tiles_before(div(start, PAGE))  # tiles that the block writes to: 0, 1 or 2
    program = _Program(
        sizes, row, head, part, start, count, qkv_ref, angles, bits_ref, table_ref, caches, (keys, values),
        (keys_full, values_full), block, block_arrived,
    )  # fmt: skip
    for j in range(sizes.slots):
        program.fetch(0, jnp.int32(j))
    pl.when(of_block > 0)(lambda: program.fetch_block(0))
    turns = [load(x.at[row]) for x in angles[:2]]
    plgpu.barrier_wait(queries_arrived)
    queries = program.turned(vectors, turns)
    for j in range(sizes.slots):
        program.fetch(1, jnp.int32(j))  # where the queries lay

    by_row = _LAYOUT.reduce(1)
    top, total = (plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), by_row) for x in (_FAR, 0))
    sums = plgpu.layout_cast(jnp.zeros((ROWS, sizes.dim), jnp.float32), _LAYOUT), top, total
    sums = lax.fori_loop(0, of_block, partial(program.add_tile_of_block, queries), sums)
    mixed, top, total = lax.fori_loop(of_block, count, partial(program.add_tile, queries), sums)
    if sizes.parts == 1:
        stage[...] = (mixed / lax.broadcast_in_dim(total, mixed.shape, [0])).astype(sizes.dtype)
    else:
        stage[...] = mixed
        for ref, x in zip(refs[3:5], (top, total), strict=True):
            ref.at[row, head, part][...] = x
    plgpu.commit_smem()
    for i, place in enumerate(places):
        to = out_ref.at[row, tokens, head, i] if sizes.parts == 1 else out_ref.at[row, head, part, i, tokens]
        plgpu.copy_smem_to_gmem(stage.at[place], to)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclasses.dataclass(frozen=True)
class _Program:
    """One program: its place in the grid, and references to what it reads and writes."""

    sizes: Sizes
    row: jax.Array
    head: jax.Array
    part: jax.Array
    start: jax.Array  # i32[] the slot of the block's first token
    count: jax.Array  # i32[] the part's tiles in use
    qkv: Any  # [B, T, kv_heads, group + 2, D]
    angles: Any  # cos and sin, f32[B, 64, D / 2], by the rows of the matrix; and f32[B, 64 + T + 64, D / 2]
    bits: Any  # i32[B, S], or None
    table: Any  # i32[B, W], or None
    caches: Any  # keys and values, in global memory
    rings: Any  # keys and values [slots, 64, D], in shared memory
    full: Any  # barriers: a slot of keys, or of values, has arrived
    block: Any  # [2, 80, D] the block's keys and values
    block_arrived: Any

    def tile(self, j) -> jax.Array:
        """The row's tile that is the part's j-th. The part's last tile in use is its first."""
        return self.part + (self.count - 1 - j) * self.sizes.parts

    def cells(self, cache, j, first: int, number: int):
        """A run of slots of the j-th tile, in global memory."""
        if self.table is None:
            return cache.at[self.row, self.head, pl.ds(self.tile(j) * PAGE + first, number)]
        return cache.at[self.table[self.row, self.tile(j)], self.head, pl.ds(first, number)]

    def fetch(self, which: int, j) -> None:
        """Starts to copy the keys (0) or the values (1) of the j-th tile, if there is one."""
        slot = rem(j, self.sizes.slots)

        @pl.when(j < self.count)
        def _():
            source = self.cells(self.caches[which], j, 0, PAGE)
            plgpu.copy_gmem_to_smem(source, self.rings[which].at[slot], self.full[which].at[slot])

    def fetch_block(self, j) -> None:
        """Starts to copy the block's keys and values to where they belong beside the j-th tile."""
        place = pl.ds(EIGHT + self.start - self.tile(j) * PAGE, self.sizes.block)
        for i in (0, 1):
            source = self.qkv.at[self.row, :, self.head, self.sizes.group + i]
            plgpu.copy_gmem_to_smem(source, self.block.at[i, place], self.block_arrived)

    def turned(self, vectors, angles) -> tuple[jax.Array, jax.Array]:
        """Rows of shared memory [64, D], rotated by cos and sin f32[64, D / 2]. -> both halves, [64, D / 2]."""
        half, (cos, sin) = self.sizes.dim // 2, angles
        low = load(vectors.at[:, pl.ds(0, half)]).astype(jnp.float32)
        high = load(vectors.at[:, pl.ds(half, half)]).astype(jnp.float32)
        return tuple(x.astype(self.sizes.dtype) for x in (low * cos - high * sin, high * cos + low * sin))

    def seen(self, j) -> jax.Array:
        """Which slots of the j-th tile each row's token sees. -> bool[64, 64]"""
        token = rem(_iota((ROWS, PAGE), 0), EIGHT)
        if self.bits is None:
            return _iota((ROWS, PAGE), 1) + self.tile(j) * PAGE <= self.start + token
        bits = load(self.bits.at[self.row, pl.ds(self.tile(j) * PAGE, PAGE)], _LAYOUT.reduce(0))
        return (lax.shift_right_logical(lax.broadcast_in_dim(bits, token.shape, [1]), token) & 1) == 1

    def add_tile(self, queries, j, sums: tuple) -> tuple:
        """The sums after the j-th tile, which lies before the block."""
        slot = rem(j, self.sizes.slots)
        seen = None if self.bits is None else self.seen(j)
        plgpu.barrier_wait(self.full[0].at[slot])
        scores = _scores(queries, self.rings[0].at[slot])
        self.fetch(0, j + self.sizes.slots)
        sums, weights = _weighed(sums, scores, seen)
        plgpu.barrier_wait(self.full[1].at[slot])
        sums = _mixed(sums, weights, self.rings[1].at[slot])
        self.fetch(1, j + self.sizes.slots)
        return sums

    def add_tile_of_block(self, queries, j, sums: tuple) -> tuple:
        """The sums after the j-th tile, to which the block writes."""
        keys, values = (ring.at[rem(j, self.sizes.slots)] for ring in self.rings)
        pl.when(j > 0)(lambda: self.fetch_block(j))
        self.write_block(j, keys, values)
        sums, weights = _weighed(sums, _scores(queries, keys), self.seen(j))
        sums = _mixed(sums, weights, values)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for which in (0, 1):
            self.fetch(which, j + self.sizes.slots)
        return sums

    def write_block(self, j, keys, values) -> None:
        """Puts the block's entries into the j-th tile in shared memory, and copies them to the cache."""
        s, at, half = self.sizes, self.start - self.tile(j) * PAGE, self.sizes.dim // 2
        angles = [load(x.at[self.row, pl.ds(PAGE - at, PAGE)]) for x in self.angles[2:]]
        place = _iota((PAGE, half), 0)
        new = (place >= at) & (place < at + s.block)
        plgpu.barrier_wait(self.block_arrived)
        of_keys, of_values = (self.block.at[i, pl.ds(EIGHT, PAGE)] for i in (0, 1))
        turned = self.turned(of_keys, angles)
        for full in self.full:
            plgpu.barrier_wait(full.at[rem(j, s.slots)])
        for i, k in enumerate(turned):
            columns = (slice(None), pl.ds(i * half, half))
            v = jnp.where(new, load(of_values.at[columns]), load(values.at[columns]))
            finite = jnp.abs(v.astype(jnp.float32)) < jnp.inf  # as in specjax.models.cache.finite_values
            k = jnp.where(finite, k, jnp.array(jnp.nan, s.dtype))
            keys[columns] = jnp.where(new, k, load(keys.at[columns]))
            values[columns] = jnp.where(finite, v, jnp.array(0, s.dtype))
        plgpu.commit_smem()
        for first in range(0, PAGE, EIGHT):
            holds_new = (first < at + s.block) & (first + EIGHT > at)
            for tile, cache in zip((keys, values), self.caches, strict=True):
                plgpu.copy_smem_to_gmem(tile.at[pl.ds(first, EIGHT)], self.cells(cache, j, first, EIGHT), holds_new)


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_LAYOUT)


def _scores(queries: tuple, keys) -> jax.Array:
    """Products of both halves of the queries, [64, D / 2], with a tile's keys [64, D]. -> f32[64, 64]"""
    half = keys.shape[1] // 2

    def products(sums):
        for i, q in enumerate(queries):
            plgpu.wgmma(sums, q, keys.at[:, pl.ds(i * half, half)].transpose((1, 0)))
        return sums[...]

    return pl.run_scoped(products, plgpu.ACC((ROWS, PAGE), jnp.float32))


def _weighed(sums: tuple, scores: jax.Array, seen: jax.Array | None) -> tuple[tuple, jax.Array]:
    """The sums after a tile, but for its values, and the weights [64, 64] of the values. ``seen`` is None: all are."""
    mixed, top, total = sums
    dim = mixed.shape[1]
    scores = scores * (dim**-0.5 * math.log2(math.e))
    scores = scores if seen is None else jnp.where(seen, scores, _FAR)
    higher = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - lax.broadcast_in_dim(higher, scores.shape, [0]))
    weights = weights if seen is None else jnp.where(seen, weights, 0.0)
    fade = jnp.exp2(top - higher)
    mixed = mixed * lax.broadcast_in_dim(fade, mixed.shape, [0])
    return (mixed, higher, total * fade + jnp.sum(weights, axis=1)), weights


def _mixed(sums: tuple, weights: jax.Array, values) -> tuple:
    """The sums with a tile's values [64, D], which lie in shared memory, by their weights f32[64, 64]."""
    mixed, top, total = sums
    weights = weights.astype(values.dtype)
    mixed = pl.run_state(lambda to: plgpu.wgmma(to, weights, values))(plgpu.ACC.init(mixed))
    return mixed, top, total


def div(x: jax.Array, by: int) -> jax.Array:
    """x // by, of i32 that are not negative, also where JAX's integers have 64 bits."""
    return lax.div(x, jnp.int32(by))


def rem(x: jax.Array, by: int) -> jax.Array:
    return lax.rem(x, jnp.int32(by))


def load(ref, layout=_LAYOUT) -> jax.Array:
    """The content of a reference. The threads of a warp may have to wait for each other's reads."""
    options: dict[str, Any] = {"layout": layout, "optimized": False}
    return plgpu.load(ref, **options)
