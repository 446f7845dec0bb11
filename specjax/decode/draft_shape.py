"""The shape of a draft: which drafted tokens stand before which.

Node 0 is the last committed token, and drafted token i is node i + 1. A draft is a chain of K tokens or a tree of N
tokens, at most K deep. A round asks every shape the same questions; a chain answers them without arrays.
"""

import dataclasses
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.decode import sampling
from specjax.decode.arrays import row_at, span


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ChainShape:
    """Each token stands before all later ones."""

    is_tree = False

    def depths(self, num_drafted: int) -> jax.Array:
        """Depth of every node, i32[R, N+1], where R is 1 if all rows are alike and else B. The root has depth 0."""
        return span(num_drafted + 1)

    def below(self, flags: jax.Array) -> jax.Array:
        """Which drafted tokens have a flagged node before them: bool[B, N+1] of nodes to bool[B, N] of tokens."""
        return jnp.cumsum(flags[:, :-1], axis=1, dtype=jnp.int32) > 0

    def leads_to(self, flags: jax.Array) -> jax.Array:
        """Which nodes are flagged or have a flagged node below them: bool[B, N+1] to bool[B, N+1]."""
        return lax.cummax(flags.astype(jnp.int32), axis=1, reverse=True) > 0

    def path(self, tokens: jax.Array, num_speculative_tokens: int) -> jax.Array:
        """The drafted tokens up to each node, that node included, then NO_TOKEN: i32[B, N] to i32[B, N+1, K]."""
        del num_speculative_tokens
        return sampling.chain_path(tokens)

    def attention(self, starts: jax.Array, capacity: int) -> tuple[None, None]:
        """Rotary positions and mask for a block of all nodes, fed to a model at starts i32[B]. None: the usual ones."""
        del starts, capacity
        return None, None


class TreeShape:
    """The questions of :class:`ChainShape`, for a tree, from the arrays that its subclasses have.

    parents: i32[R, N], the parent node of each drafted token.
    ancestors: bool[R, N+1, N+1]; [r, i, j] says whether node j is node i or stands before it.
    depth: i32[R, N+1] of every node.
    """

    is_tree = True
    parents: Any
    ancestors: Any
    depth: Any

    def depths(self, num_drafted: int) -> Any:
        del num_drafted
        return self.depth

    def below(self, flags: jax.Array) -> jax.Array:
        flagged = jnp.sum(self.ancestors & flags[:, None], axis=2, dtype=jnp.int32)  # [B, N+1] with the node itself
        return (flagged - flags.astype(jnp.int32))[:, 1:] > 0

    def leads_to(self, flags: jax.Array) -> jax.Array:
        return jnp.any(self.ancestors & flags[..., None], axis=1)

    def path(self, tokens: jax.Array, num_speculative_tokens: int) -> jax.Array:
        at_level = self.depth[..., None] == 1 + span(num_speculative_tokens)[None]  # [R, N+1, K]
        numbered = jnp.pad(tokens - sampling.NO_TOKEN, ((0, 0), (1, 0)))  # [B, N+1]; where nothing is added, NO_TOKEN
        before, at_level = (jnp.asarray(x, jnp.int32) for x in (self.ancestors, at_level))
        before, at_level = (jnp.broadcast_to(x, (len(tokens), *x.shape[1:])) for x in (before, at_level))
        return jnp.einsum("bij,bjk,bj->bik", before, at_level, numbered) + sampling.NO_TOKEN

    def attention(self, starts: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        return starts[:, None] + self.depth, seen(self.ancestors, starts, capacity)

    def line(self, node: jax.Array, valid: jax.Array, num_speculative_tokens: int) -> tuple[jax.Array, jax.Array]:
        """One node a level: the nodes on the way to ``node``, then the first valid one of each level below.

        Below ``node`` a node that descends from it is preferred.

        Args:
          node: i32[B].
          valid: bool[B, N] of the drafted tokens. No valid token has an invalid parent.
          num_speculative_tokens: K.

        Returns:
          i32[B, K] node numbers, 0 where the level has no valid node, and bool[B, K] whether the level has one.
        """
        valid = jnp.pad(valid, ((0, 0), (1, 0)))
        ancestors = jnp.broadcast_to(self.ancestors, (len(node), *self.ancestors.shape[1:]))
        on_the_way = row_at(ancestors, node).astype(jnp.int32)
        descends = row_at(ancestors.swapaxes(1, 2), node).astype(jnp.int32)
        rank = jnp.where(valid, 1 + descends + 2 * on_the_way, 0)  # [B, N+1]
        at_level = self.depth[:, None] == 1 + span(num_speculative_tokens)[..., None]  # [R, K, N+1]
        rank = jnp.where(at_level, rank[:, None], 0)
        return jnp.argmax(rank, axis=2).astype(jnp.int32), jnp.any(rank > 0, axis=2)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class FixedTreeShape(TreeShape):
    """The same tree in every row, known when the program is traced: its arrays are NumPy's, with one row.

    Args:
      above: the parent node of each drafted token, in the order of the tokens.
    """

    above: tuple[int, ...]

    @cached_property
    def parents(self) -> np.ndarray:
        return np.array(self.above, np.int32)[None]

    @cached_property
    def ancestors(self) -> np.ndarray:
        found = np.eye(len(self.above) + 1, dtype=bool)
        for node, parent in enumerate(self.above, 1):
            found[node] |= found[parent]
        return found[None]

    @cached_property
    def depth(self) -> np.ndarray:
        return self.ancestors.sum(axis=2, dtype=np.int32) - 1


class GrownTreeArrays(NamedTuple):
    parents: jax.Array  # i32[B, N]
    ancestors: jax.Array  # bool[B, N+1, N+1]
    depth: jax.Array  # i32[B, N+1]


class GrownTreeShape(TreeShape, GrownTreeArrays):
    """A tree of its own in each row, grown on the device. Made by :func:`grown`."""


Shape = ChainShape | FixedTreeShape | GrownTreeShape
CHAIN = ChainShape()


def grown(parents: jax.Array) -> GrownTreeShape:
    """The shape of trees with parents i32[B, N].

    By doubling: after m steps each node knows its 2^m nearest ancestors.
    """
    size = parents.shape[1]
    nodes = span(size + 1)
    above = jnp.pad(parents, ((0, 0), (1, 0)))  # the root counts as its own parent
    known = (nodes[:, None] == above[..., None]) | (nodes[:, None] == nodes[..., None])  # [B, N+1, N+1]
    for _ in range((size - 1).bit_length()):
        known = jnp.einsum("bij,bjk->bik", known.astype(jnp.float32), known.astype(jnp.float32)) > 0
    return GrownTreeShape(parents, known, jnp.sum(known, axis=2, dtype=jnp.int32) - 1)


def parents_of(shape: Shape, rows: int, num_drafted: int) -> jax.Array:
    """The parent node of each drafted token, i32[B, N], whatever the shape."""
    above = span(num_drafted) if isinstance(shape, ChainShape) else jnp.asarray(shape.parents)
    return jnp.broadcast_to(above, (rows, num_drafted))


def seen(ancestors: Any, starts: jax.Array, capacity: int) -> jax.Array:
    """Attention mask of nodes whose entries follow each row's committed ones.

    Args:
      ancestors: bool[R, W, M], which of M entries, in order from a row's start on, each of W nodes sees.
      starts: i32[B], the number of committed entries.
      capacity: S, slots of the cache.

    Returns:
      bool[B, W, S].
    """
    place = span(capacity) - starts[:, None]  # [B, S]
    _, width, size = ancestors.shape
    inside = jnp.broadcast_to(jnp.clip(place, 0, size - 1)[:, None], (len(starts), width, capacity))
    own = jnp.take_along_axis(jnp.broadcast_to(ancestors, (len(starts), width, size)), inside, axis=2)
    return (place < 0)[:, None] | ((place < size)[:, None] & own)
