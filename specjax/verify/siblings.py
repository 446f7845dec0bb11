"""Siblings: several proposals for one position, judged one after the other (iterative speculative sampling, lossless).

Stratos, "Speculative decoding", section 2; trees apply it at every node (Miao et al. 2024, SpecInfer). Siblings may
come from different q, from one q with replacement, or without: only each one's own q_k, given those before it, counts.
"""

import jax
import jax.numpy as jnp

from specjax.decode.arrays import span
from specjax.verify import pieces as chain


def after_refusal(r: jax.Array, mass: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What is aimed at once a sibling drawn from q is refused: norm(max(0, r / mass - q)) where it was r / mass.

    Unnormalised, so that the first sibling's is the chain's residual to the last bit. A refused token is left with 0,
    so a duplicate of it is never accepted.

    Args:
      r: f32[B, V].
      mass: f32[B], what r sums to.
      q: f32[B, V].

    Returns:
      The new r and mass.
    """
    rest = chain.residual(r, mass[:, None] * q)
    return rest, jnp.sum(rest, axis=-1)


def without_replacement(q: jax.Array, drawn: jax.Array) -> jax.Array:
    """What each of M siblings, drawn from one q without replacement, was drawn from.

    Args:
      q: f32[B, V].
      drawn: i32[B, M], in the order of the draws.

    Returns:
      f32[B, M, V]: q without the tokens drawn before, renormalised; zeros once nothing is left.
    """
    size, vocab = drawn.shape[1], q.shape[-1]
    before = span(size) < jnp.arange(size, dtype=jnp.int32)[:, None]  # [M, M]
    taken = jnp.any(before[None, ..., None] & jax.nn.one_hot(drawn, vocab, dtype=bool)[:, None], axis=2)  # [B, M, V]
    left = jnp.where(taken, 0.0, q[:, None])
    mass = jnp.sum(left, axis=-1, keepdims=True)
    return left / jnp.where(mass > 0, mass, 1.0)
