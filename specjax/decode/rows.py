"""Rows of a whole state: taken, inserted, permuted and released. Axis 0 of every array is the row."""

from typing import TypeVar

import jax

from specjax.decode.types import DecodeState

Tree = TypeVar("Tree")


def take(state: Tree, rows: jax.Array) -> Tree:
    """A state of M rows: the rows i32[M] of ``state``, in the order given.

    A row may be taken more than once. If every row is taken once, the rows are permuted.
    """
    return jax.tree.map(lambda x: x[rows], state)


def insert(state: Tree, rows: jax.Array, other: Tree) -> Tree:
    """``state``, with its rows i32[M] replaced by the M rows of ``other``.

    Both states must have the same tree: the same kind of drafter, the same capacity, and the same sampling parameters.
    ``SamplingParams.full`` gives every state the same sampling parameters.
    """
    return jax.tree.map(lambda x, y: x.at[rows].set(y), state, other)


def release(state: DecodeState, rows: jax.Array) -> DecodeState:
    """``state``, in which the rows marked by bool[B] no longer run.

    The lengths, tokens and caches of these rows stay as they are.
    """
    return state._replace(active=state.active & ~rows)
