"""Recursive rejection on a token tree: the children of each node are judged in turn (Miao et al. 2024, SpecInfer)."""

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode import random
from specjax.decode.arrays import row_at, span
from specjax.decode.draft_shape import parents_of
from specjax.decode.types import Draft, Verdict
from specjax.verify import pieces as chain
from specjax.verify import siblings


def recursive_rejection(p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
    """Goes down the tree from the root, judging the children of the node that was accepted last.

    At each node r starts as the target's p after the node. A child x is accepted with probability min(1, r(x) / q(x)).
    If the child is refused, r becomes norm(max(0, r - q)), and the next child is judged. If no child is left, the next
    token is drawn from r.

    Args:
      p: f32[B, N+1, V], the target's probabilities after each node.
      draft: a tree with probabilities.
      keys: key[B], the rows' own keys.
      lengths: i32[B].
    """
    rows, size = draft.tokens.shape
    parents, probs = parents_of(draft.shape, rows, size), draft.probs
    assert probs is not None
    depth = jnp.broadcast_to(draft.shape.depths(size), (rows, size + 1))
    positions = lengths[:, None] + depth[:, 1:] - 1
    keys_of = random.at(random.fold(keys, random.ACCEPT), positions)
    u = random.uniform(random.siblings(keys_of, ranks(parents)))  # [B, N]
    index = jnp.arange(draft.tokens.shape[1], dtype=lengths.dtype)[None]

    def to_judge(reached, last):
        """Whether node ``reached`` has a valid child after drafted token ``last``, and the index of the first one."""
        left = draft.valid & (parents == reached[:, None]) & (index > last[:, None])
        return jnp.any(left, axis=1), jnp.argmax(left, axis=1).astype(lengths.dtype)

    def judge(carry):
        # The node accepted last, the drafted token judged last, and the distribution r / mass of the token below the
        # node.
        reached, last, r, mass = carry
        judged, i = to_judge(reached, last)
        token, q = row_at(draft.tokens, i), row_at(probs, i)
        r_x, q_x = (jnp.take_along_axis(x, token[:, None], axis=1)[:, 0] for x in (r, q))
        accepted = judged & chain.accepts(row_at(u, i), r_x / mass, q_x)
        rest, left = siblings.after_refusal(r, mass, q)
        r = jnp.where(accepted[:, None], row_at(p, i + 1), jnp.where(judged[:, None], rest, r))
        mass = jnp.where(accepted, 1.0, jnp.where(judged, left, mass))
        return jnp.where(accepted, i + 1, reached), jnp.where(judged, i, last), r, mass

    start = jnp.zeros_like(lengths), jnp.full_like(lengths, -1), p[:, 0], jnp.ones(lengths.shape, jnp.float32)
    node, _, r, _ = lax.while_loop(lambda carry: jnp.any(to_judge(*carry[:2])[0]), judge, start)
    count = row_at(depth, node)
    return Verdict(count, chain.draw(keys, lengths + count, r), node)


def ranks(parents: jax.Array) -> jax.Array:
    """The rank of each drafted token among its siblings, from 0: parents i32[B, N] to ranks i32[B, N]."""
    return jnp.sum(elder_siblings(parents), axis=2, dtype=jnp.int32)


def elder_siblings(parents: jax.Array) -> jax.Array:
    """Which siblings are judged before each drafted token: parents i32[B, N] to bool[B, N, N]."""
    size = parents.shape[1]
    before = span(size) < jnp.arange(size, dtype=jnp.int32)[:, None]  # [N, N]
    return (parents[:, :, None] == parents[:, None, :]) & before[None]
