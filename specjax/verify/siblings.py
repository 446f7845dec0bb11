"""Siblings: several proposals for one position, judged one after the other, without loss.

The method is iterative speculative sampling (Stratos, "Speculative decoding", section 2). Trees apply the method at
every node (Miao et al. 2024, SpecInfer). Siblings may come from different q, or from one q with or without replacement.
The verdict on sibling k depends only on q_k, the distribution of sibling k given the siblings before it.
"""

import jax
import jax.numpy as jnp

from specjax.decode.arrays import span
from specjax.verify import pieces as chain


def after_refusal(r: jax.Array, mass: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The distribution that remains for the next sibling after a sibling drawn from q was refused.

    Before the refusal the distribution was r / mass, after it norm(max(0, r / mass - q)). The result is not normalised,
    so that after the first sibling it equals the residual of a chain to the last bit. A refused token has probability 0
    from then on, so a duplicate of the token is never accepted.

    Args:
      r: f32[B, V], the distribution before the refusal, not normalised.
      mass: f32[B], the sum of r.
      q: f32[B, V], the distribution that the refused sibling was drawn from.

    Returns:
      The new r and the new mass.
    """
    rest = chain.residual(r, mass[:, None] * q)
    return rest, jnp.sum(rest, axis=-1)


def without_replacement(q: jax.Array, drawn: jax.Array) -> jax.Array:
    """The distribution of each of M siblings that are drawn from one q without replacement.

    Args:
      q: f32[B, V], the distribution of the first sibling.
      drawn: i32[B, M], the siblings in the order of the draws.

    Returns:
      f32[B, M, V]: for each sibling, q without the mass of the siblings drawn before, renormalised. All zeros if no
      mass is left.
    """
    size, vocab = drawn.shape[1], q.shape[-1]
    before = span(size) < jnp.arange(size, dtype=jnp.int32)[:, None]  # [M, M]
    taken = jnp.any(before[None, ..., None] & jax.nn.one_hot(drawn, vocab, dtype=bool)[:, None], axis=2)  # [B, M, V]
    left = jnp.where(taken, 0.0, q[:, None])
    mass = jnp.sum(left, axis=-1, keepdims=True)
    return left / jnp.where(mass > 0, mass, 1.0)
