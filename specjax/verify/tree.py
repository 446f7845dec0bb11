"""Recursive rejection on a token tree: at each node its children are judged in turn (Miao et al. 2024, SpecInfer).

One pass over the nodes in index order, which meets every node after its parent and its earlier siblings.
"""

import jax
import jax.numpy as jnp
from jax import lax

from specjax import random, tree
from specjax.types import Draft, Verdict
from specjax.verify import chain, multi


def recursive_rejection(p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
    """Accept child x of the node reached with probability min(1, r(x) / q(x)), else r becomes norm(max(0, r - q)).

    r starts as the target's p at that node; when no child is left the next token is drawn from it. Arguments as of
    ``Verifier.verify``.
    """
    shape = tree.of(draft)
    assert isinstance(shape, tree.Tree) and draft.parents is not None
    parents, vocab = draft.parents, p.shape[-1]
    positions = lengths[:, None] + shape.depth[:, 1:] - 1
    u = random.uniform(random.siblings(random.at(random.fold(keys, random.ACCEPT), positions), ranks(parents)))

    def judge(carry, i):
        reached, r, mass = carry  # the node reached, and what is aimed at below it
        token = draft.tokens[:, i]
        q = jax.nn.one_hot(token, vocab) if draft.probs is None else draft.probs[:, i]
        r_x, q_x = (jnp.take_along_axis(x, token[:, None], axis=1)[:, 0] for x in (r, q))
        judged = draft.valid[:, i] & (parents[:, i] == reached)
        accepted = judged & chain.accepts(u[:, i], r_x / mass, q_x)
        rest, left = multi.after_refusal(r, mass, q)
        r = jnp.where(accepted[:, None], p[:, i + 1], jnp.where(judged[:, None], rest, r))
        mass = jnp.where(accepted, 1.0, jnp.where(judged, left, mass))
        return (jnp.where(accepted, i + 1, reached), r, mass), None

    start = jnp.zeros_like(lengths), p[:, 0], jnp.ones(lengths.shape)
    (node, r, _), _ = lax.scan(judge, start, jnp.arange(draft.tokens.shape[1], dtype=lengths.dtype))
    count = chain.row_at(shape.depth, node)
    return Verdict(count, chain.draw(keys, lengths + count, r), node)


def ranks(parents: jax.Array) -> jax.Array:
    """How many children of the same parent stand before each node: i32[B, N] of parents i32[B, N]."""
    size = parents.shape[1]
    before = jnp.arange(size) < jnp.arange(size)[:, None]  # [N, N]
    return jnp.sum((parents[:, :, None] == parents[:, None, :]) & before, axis=2, dtype=jnp.int32)
