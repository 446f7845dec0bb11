"""Rows of a whole state: taken, inserted, permuted and released. Axis 0 of every array is the row.

Pools of pages are the exception: all rows share them. :func:`take` and :func:`insert` move a row's table, and leave the
pages where they are.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from specjax.decode.types import DecodeState
from specjax.models import axes
from specjax.models.cache import KVCache

Tree = TypeVar("Tree")


def take(state: Tree, rows: jax.Array) -> Tree:
    """A state of M rows: the rows i32[M] of ``state``, in the order given.

    A row may be taken more than once. If every row is taken once, the rows are permuted. Of a paged cache, the result
    has the whole pool.
    """

    def taken(cache: KVCache) -> KVCache:
        alone = jax.tree.map(lambda x: x[rows], without_pools(cache))
        return with_pools(alone, cache)

    return over_caches(taken, lambda x: x[rows], state)


def insert(state: Tree, rows: jax.Array, other: Tree) -> Tree:
    """``state``, with its rows i32[M] replaced by the M rows of ``other``.

    Both states must have the same tree: the same kind of drafter, the same capacity, and the same sampling parameters.
    ``SamplingParams.full`` gives every state the same sampling parameters. Of paged caches, the result has the pools of
    ``state``.
    """

    def put(x, y):
        return x.at[rows].set(y)

    def inserted(cache: KVCache, new: KVCache) -> KVCache:
        return with_pools(jax.tree.map(put, without_pools(cache), without_pools(new)), cache)

    return over_caches(inserted, put, state, other)


def release(state: DecodeState, rows: jax.Array) -> DecodeState:
    """``state``, in which the rows marked by bool[B] no longer run, and own no pages.

    The lengths and tokens of these rows stay as they are. So do the entries of contiguous caches.
    """

    def cleared(cache: KVCache) -> KVCache:
        return cache if cache.table is None else cache.replace(table=jnp.where(rows[:, None], 0, cache.table))

    state = over_caches(cleared, lambda x: x, state)
    return state._replace(active=state.active & ~rows)


def with_table(state: Tree, table: jax.Array) -> Tree:
    """``state``, with the pages i32[B, W] in the tables of all its paged caches. Each takes as many as it has room for.

    W is the width of the widest table.
    """

    def given(cache: KVCache) -> KVCache:
        return cache if cache.table is None else cache.replace(table=table[:, : cache.table.shape[1]])

    return over_caches(given, lambda x: x, state)


def narrowed(state: Tree, width: int) -> Tree:
    """``state``, in which no table has more than ``width`` pages a row."""

    def cut(cache: KVCache) -> KVCache:
        return cache if cache.table is None else cache.replace(table=cache.table[:, :width])

    return over_caches(cut, lambda x: x, state)


def with_tables(state: Tree, other: Tree) -> Tree:
    """``state``, whose paged caches have the tables of ``other``, a state of the same caches and rows."""

    def given(cache: KVCache, giver: KVCache) -> KVCache:
        return cache.replace(table=giver.table)

    return over_caches(given, lambda x, _: x, state, other)


def without_pools(state: Tree) -> Tree:
    """``state``, whose paged caches have no pools. What is left belongs to the rows alone."""

    def bare(cache: KVCache) -> KVCache:
        return cache if cache.table is None else cache.replace(keys=(), values=())

    return over_caches(bare, lambda x: x, state)


def with_pools(state: Tree, other: Tree) -> Tree:
    """``state``, whose paged caches have the pools of ``other``, a state of the same caches and any number of rows."""

    def lent(cache: KVCache, lender: KVCache) -> KVCache:
        return cache if cache.table is None else cache.replace(keys=lender.keys, values=lender.values)

    return over_caches(lent, lambda x, _: x, state, other)


def over_mesh(state: DecodeState, mesh: Mesh | None) -> DecodeState:
    """``state``, each of whose rows lies on one part of the mesh, if the mesh has parts that share rows."""
    if axes.parts(mesh) == 1:
        return state
    where = axes.of_rows(cast(Mesh, mesh))

    def placed(x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, axes.fitted(where, len(x)))

    def of_cache(cache: KVCache) -> KVCache:  # attention keeps keys and values where they are
        bare = jax.tree.map(placed, cache.replace(keys=(), values=()))
        return bare.replace(keys=cache.keys, values=cache.values)

    return over_caches(of_cache, placed, state)


def over_caches(of_cache: Callable, of_array: Callable, state: Tree, *others: Any) -> Tree:
    """``state`` with ``of_cache`` of every cache, and ``of_array`` of every array outside caches."""

    def either(x, *rest):
        return of_cache(x, *rest) if isinstance(x, KVCache) else of_array(x, *rest)

    return jax.tree.map(either, state, *others, is_leaf=lambda x: isinstance(x, KVCache))
