"""Several proposals for one position, judged one after the other: iterative speculative sampling, lossless.

Stratos, "Speculative decoding", section 2; trees apply it at every node (Miao et al. 2024, SpecInfer). Siblings may
come from different q, from one q with replacement, or without: only each one's own q_k, given those before it, counts.
"""

import jax
import jax.numpy as jnp
from jax import lax

from specjax import random
from specjax.verify import chain


def multi_proposal(
    p: jax.Array, q: jax.Array, proposals: jax.Array, keys: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Accepts one of M proposals or none; the token's law is p, whatever the q_k.

    Args:
      p: f32[B, V] the target's distribution.
      q: f32[B, M, V]; row k is what proposal k was drawn from, given the proposals before it. A row of zeros is
        never accepted (padding, or nothing left to draw).
      proposals: i32[B, M].
      keys: key[B], the rows' own.
      positions: i32[B] the absolute position that the proposals are for.

    Returns:
      i32[B] the index of the accepted proposal, M if there is none; and i32[B] the token.
    """
    size = proposals.shape[1]
    h, targets = acceptance(p, q, proposals)
    at = random.at(random.fold(keys, random.ACCEPT), positions[:, None])[:, 0]
    u = random.uniform(random.at(at, jnp.broadcast_to(jnp.arange(size), proposals.shape)))
    index = chain.leading_run(u >= h)  # refusals before the first acceptance
    own = chain.draw(keys, positions, targets[:, -1])
    token = chain.row_at(jnp.concatenate([proposals, own[:, None]], axis=1), index)
    return index, token


def acceptance(p: jax.Array, q: jax.Array, proposals: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The probability of accepting each proposal once those before it are refused, and what is then aimed at.

    p_0 = p; accept x_k with probability min(1, p_{k-1}(x_k) / q_k(x_k)), else p_k = norm(max(0, p_{k-1} - q_k)).
    A refused token has p_k = 0, so a duplicate is never accepted.

    Returns:
      f32[B, M]; and p_0..p_M, f32[B, M+1, V].
    """

    def step(p_k, sibling):
        q_k, x = sibling
        p_x, q_x = (jnp.take_along_axis(probs, x[:, None], axis=-1)[:, 0] for probs in (p_k, q_k))
        h = jnp.where(p_x < q_x, p_x / jnp.where(q_x > 0, q_x, 1.0), 1.0) * (q_x > 0)
        rest = chain.residual(p_k, q_k)
        rest = rest / jnp.sum(rest, axis=-1, keepdims=True)
        return rest, (h, rest)

    _, (h, rest) = lax.scan(step, p, (q.swapaxes(0, 1), proposals.T))
    return h.T, jnp.concatenate([p[:, None], rest.swapaxes(0, 1)], axis=1)


def without_replacement(q: jax.Array, drawn: jax.Array) -> jax.Array:
    """What each of M siblings, drawn from one q without replacement, was drawn from.

    Args:
      q: f32[B, V].
      drawn: i32[B, M], in the order of the draws.

    Returns:
      f32[B, M, V]: q without the tokens drawn before, renormalised; zeros once nothing is left.
    """
    size, vocab = drawn.shape[1], q.shape[-1]
    before = jnp.arange(size) < jnp.arange(size)[:, None]  # [M, M]
    taken = jnp.any(before[..., None] & jax.nn.one_hot(drawn, vocab, dtype=bool)[:, None], axis=2)  # [B, M, V]
    left = jnp.where(taken, 0.0, q[:, None])
    mass = jnp.sum(left, axis=-1, keepdims=True)
    return left / jnp.where(mass > 0, mass, 1.0)
