"""Traversal verification: a tree is judged from its leaves up to its root, so a refused node still leaves its siblings.

Source: Weng et al. 2025, "Traversal verification for speculative tree decoding" (arXiv 2505.12398). On a chain this is
block verification (``specjax.verify.block``).

The nodes are judged in the order of a depth-first walk, each after all nodes below it. The first node that passes is
kept, with the nodes above it. Why this is lossless: if a node is reached with weight a and distribution r, then some
node of its subtree is kept with probability a, and the text that follows has the law of r. For a leaf that is plain.
For an inner node it follows for its children in turn, if each child is drawn from its q *given all that was judged
before the child*. Siblings may be drawn with or without replacement. But nodes with different parents must be drawn
independently, so the draft keys are :class:`specjax.decode.random.Apart`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode import random
from specjax.decode.arrays import row_at, span
from specjax.decode.draft_shape import Shape, parents_of
from specjax.decode.types import Draft, Verdict
from specjax.verify import pieces as chain
from specjax.verify.coupled import own_draws
from specjax.verify.tree_rejection import elder_siblings


@dataclasses.dataclass(frozen=True)
class Traversal:
    """Keeps the first node with u < h in the order of the walk, and draws from the distribution that is left there.

    The u are uniform and independent, one a node. h and the distributions left are :func:`thresholds`. Drafts of point
    masses are judged by the target's own draws, as in ``Rejection``: no rule keeps more of such drafts.
    """

    lossless = True
    trees = True

    # Which node is kept depends on tokens and uniforms of nodes that are not kept. So the keys of both are folded with
    # the row's length at the start of the round, as in ``Block``.
    def draft_keys(self, keys: jax.Array, lengths: jax.Array) -> random.Apart:
        return random.Apart(random.fold(random.fold(keys, random.DRAFT), lengths))

    def verify(self, p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
        if draft.probs is None:
            return own_draws(p, draft, random.fold(keys, random.TOKEN), lengths)
        h, left = thresholds(p, draft)
        addresses = lengths[:, None] + span(draft.tokens.shape[1])  # one a node; on a chain, its position
        u = random.uniform(random.at(random.fold(random.fold(keys, random.ACCEPT), lengths), addresses))
        node, count = first_on_the_walk(draft.shape, draft.valid & (u < h[:, 1:]))
        token = chain.draw(keys, lengths + count, row_at(left, node))
        return Verdict(count, token, node if draft.shape.is_tree else None)


def thresholds(p: jax.Array, draft: Draft) -> tuple[jax.Array, jax.Array]:
    """For each node h, the probability that the node passes once all nodes below it were refused, and what is left.

    A node starts with r = p and with a = min(1, a r(x) / q(x)), where x is the node's token and the other a and r are
    its parent's at that time. When a child that was drawn from q is refused, a r loses q: with R = sum max(0, a r - q)
    the new a is R / (R + 1 - a), and the new r is max(0, a r - q) / R. None of this depends on a uniform, so one pass
    over the nodes, parents first, finds a and r of every node after the refusal of its last child.

    Args:
      p: f32[B, N+1, V], the target's probabilities after each node.
      draft: a chain or a tree with probabilities.

    Returns:
      h f32[B, N+1], 1 at the root and 0 at nodes that are not valid, and r f32[B, N+1, V], which sums to 1.
    """
    rows, size = draft.tokens.shape
    parents, every_row, probs = parents_of(draft.shape, rows, size), jnp.arange(rows, dtype=jnp.int32), draft.probs
    assert probs is not None

    def judge(i, carry):
        a, r = carry
        above, token, q, valid = (x[:, i] for x in (parents, draft.tokens, probs, draft.valid))
        a_v, r_v = row_at(a, above), row_at(r, above)  # [B], [B, V]
        r_x, q_x = (jnp.take_along_axis(x, token[:, None], axis=1)[:, 0] for x in (r_v, q))
        a_x = jnp.where(valid & (q_x > 0), jnp.minimum(1.0, a_v * r_x / q_x), 0.0)
        rest = jnp.maximum(a_v[:, None] * r_v - q, 0.0)
        mass = jnp.sum(rest, axis=-1)
        after = jnp.where(a_v < 1, mass / (mass + 1 - a_v), 1.0)  # a = 1 gives R / R; if p = q this is 0/0
        rest = jnp.where(mass[:, None] > 0, rest / mass[:, None], r_v)
        a = a.at[every_row, above].set(jnp.where(valid, after, a_v)).at[:, i + 1].set(a_x)
        return a, r.at[every_row, above].set(jnp.where(valid[:, None], rest, r_v))

    start = jnp.zeros((rows, size + 1), jnp.float32).at[:, 0].set(1.0)
    return lax.fori_loop(0, size, judge, (start, p))


def first_on_the_walk(shape: Shape, passes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first node that passes in the depth-first walk from the leaves up, and its depth.

    Args:
      shape: the draft's shape.
      passes: bool[B, N], whether each drafted token passes. The root always does.

    Returns:
      i32[B] node, and i32[B] depth.
    """
    rows, size = passes.shape
    found = shape.leads_to(jnp.pad(passes, ((0, 0), (1, 0))))[:, 1:]  # [B, N] in the subtree of each drafted token
    elder = jnp.any(elder_siblings(parents_of(shape, rows, size)) & found[:, None], axis=2)
    off = ~found | elder
    kept = ~off & ~shape.below(jnp.pad(off, ((0, 0), (1, 0))))
    node = jnp.max(jnp.where(kept, 1 + span(size), 0), axis=1, initial=0)
    return node, jnp.sum(kept, axis=1, dtype=jnp.int32)
