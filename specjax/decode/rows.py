"""Rows of a whole state: taken, inserted, permuted and released. Axis 0 of every array is the row."""

from typing import TypeVar

import jax

from specjax.decode.types import DecodeState

Tree = TypeVar("Tree")


def take(state: Tree, rows: jax.Array) -> Tree:
    """The state of rows i32[M], in that order: M rows. A row may be taken more than once; so rows are permuted too."""
    return jax.tree.map(lambda x: x[rows], state)


def insert(state: Tree, rows: jax.Array, other: Tree) -> Tree:
    """``state`` with the M rows of ``other`` in place of its rows i32[M].

    Both have the same tree: the same drafter, capacity, and sampling parameters (``SamplingParams.full``).
    """
    return jax.tree.map(lambda x, y: x.at[rows].set(y), state, other)


def release(state: DecodeState, rows: jax.Array) -> DecodeState:
    """``state`` with the rows of bool[B] no longer running: their lengths, tokens and caches stay as they are."""
    return state._replace(active=state.active & ~rows)
