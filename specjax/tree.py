"""The shape of a draft: which drafted tokens stand before which. A chain, or a tree of N nodes up to K deep.

Node 0 is the last committed token, and drafted token i is node i + 1. A round asks either shape the same few things;
a chain's answers need no arrays.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.arrays import span
from specjax.types import Draft
from specjax.verify.chain import row_at


class Chain(NamedTuple):
    """Each token stands before all later ones."""

    size: int

    @property
    def depth(self) -> jax.Array:
        """i32[1, K+1] of every node."""
        return span(self.size + 1)

    def below(self, flags: jax.Array) -> jax.Array:
        """Which drafted tokens have a node of bool[B, N+1] before them. -> bool[B, N]."""
        return jnp.cumsum(flags[:, :-1], axis=1, dtype=jnp.int32) > 0

    def path(self, tokens: jax.Array, num_speculative_tokens: int) -> jax.Array:
        """The drafted tokens i32[B, N] up to every node, itself included, then NO_TOKEN. -> i32[B, N+1, K]."""
        del num_speculative_tokens
        return sampling.chain_path(tokens)

    def attention(self, starts: jax.Array, capacity: int) -> tuple[None, None]:
        """Rotary positions and mask of a block of all nodes, fed to a model at starts i32[B]; None: its own."""
        del starts, capacity
        return None, None


class Tree(NamedTuple):
    """The same of a tree."""

    ancestors: jax.Array  # bool[B, N+1, N+1]: [b, i, j] whether j is i or stands before it
    depth: jax.Array  # i32[B, N+1]

    def below(self, flags: jax.Array) -> jax.Array:
        flagged = jnp.sum(self.ancestors & flags[:, None], axis=2, dtype=jnp.int32)  # [B, N+1] the node itself too
        flagged -= flags.astype(jnp.int32)
        return flagged[:, 1:] > 0

    def path(self, tokens: jax.Array, num_speculative_tokens: int) -> jax.Array:
        at_level = self.depth[..., None] == 1 + span(num_speculative_tokens)[None]  # [B, N+1, K]
        numbered = jnp.pad(tokens - sampling.NO_TOKEN, ((0, 0), (1, 0)))  # [B, N+1]; where nothing is added, NO_TOKEN
        before, at_level = self.ancestors.astype(jnp.int32), at_level.astype(jnp.int32)
        return jnp.einsum("bij,bjk,bj->bik", before, at_level, numbered) + sampling.NO_TOKEN

    def attention(self, starts: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        return starts[:, None] + self.depth, seen(self.ancestors, starts, capacity)

    def line(self, node: jax.Array, valid: jax.Array, num_speculative_tokens: int) -> tuple[jax.Array, jax.Array]:
        """One node a level: those on the way to node i32[B], then what was drafted there.

        Past the node it is the first valid node of each level that descends from it, else the first valid one.

        Args:
          node: i32[B].
          valid: bool[B, N] of the drafted tokens, closed: none whose parent isn't.
          num_speculative_tokens: K.

        Returns:
          i32[B, K] node numbers, and bool[B, K] whether the level has a valid node; 0 where it has none.
        """
        valid = jnp.pad(valid, ((0, 0), (1, 0)))
        on_the_way = row_at(self.ancestors, node)
        descends = row_at(self.ancestors.swapaxes(1, 2), node)
        rank = jnp.where(valid, 1 + descends.astype(jnp.int32) + 2 * on_the_way.astype(jnp.int32), 0)  # [B, N+1]
        at_level = self.depth[:, None] == 1 + span(num_speculative_tokens)[..., None]  # [B, K, N+1]
        rank = jnp.where(at_level, rank[:, None], 0)
        return jnp.argmax(rank, axis=2).astype(jnp.int32), jnp.any(rank > 0, axis=2)


def of(draft: Draft) -> Chain | Tree:
    """The shape of a draft, by doubling: after m steps every node knows its 2^m nearest ancestors."""
    size = draft.tokens.shape[1]
    if draft.parents is None:
        return Chain(size)
    nodes = span(size + 1)
    parents = jnp.pad(draft.parents, ((0, 0), (1, 0)))  # the root is its own
    known = (nodes[:, None] == parents[..., None]) | (nodes[:, None] == nodes[..., None])  # [B, N+1, N+1]
    for _ in range((size - 1).bit_length()):
        known = jnp.einsum("bij,bjk->bik", known.astype(jnp.float32), known.astype(jnp.float32)) > 0
    return Tree(known, jnp.sum(known, axis=2, dtype=jnp.int32) - 1)


def as_tree(draft: Draft, size: int) -> Draft:
    """The same draft as a tree of ``size`` nodes; those added are not valid."""
    if draft.parents is None:
        above = span(draft.tokens.shape[1])
        draft = draft._replace(parents=jnp.broadcast_to(above, draft.tokens.shape))
    more = size - draft.tokens.shape[1]
    nodes = draft._replace(least=None)  # the one field that is of the row
    wide = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2))), nodes)
    return wide._replace(least=draft.least)


def seen(ancestors: jax.Array, starts: jax.Array, capacity: int) -> jax.Array:
    """Attention mask of nodes whose entries follow starts i32[B] committed ones.

    Args:
      ancestors: bool[B, W, M], which of M entries, in order from a row's start on, each of W nodes sees.
      starts: i32[B].
      capacity: S, slots of the cache.

    Returns:
      bool[B, W, S].
    """
    place = span(capacity) - starts[:, None]  # [B, S]
    size = ancestors.shape[2]
    inside = jnp.clip(place, 0, size - 1)[:, None]
    mine = jnp.take_along_axis(ancestors, jnp.broadcast_to(inside, (*ancestors.shape[:2], capacity)), axis=2)
    return (place < 0)[:, None] | ((place < size)[:, None] & mine)
