"""What a drafter is trained to: three losses of its q against the target's p, position by position.

D drafted tokens of the target's V: p is given on those D alone, so it sums to at most 1.
"""

import jax
import jax.numpy as jnp


def cross_entropy(p: jax.Array, log_q: jax.Array, following: jax.Array) -> jax.Array:
    """-log q of the token that followed, 0 where the drafter can't draft it.

    Args:
      p: f32[..., D].
      log_q: f32[..., D].
      following: i32[...], an index into the D tokens, or D for any other.

    Returns:
      f32[...], in nats.
    """
    size = p.shape[-1]
    taken = jnp.take_along_axis(log_q, jnp.minimum(following, size - 1)[..., None], axis=-1)[..., 0]
    return jnp.where(following < size, -taken, 0.0)


def kl(p: jax.Array, log_q: jax.Array, following: jax.Array) -> jax.Array:
    """The cross entropy of q under p, in nats: KL(p, q) but for a constant (distillation, Hinton et al. 2015)."""
    del following
    return -jnp.sum(p * log_q, axis=-1)


def rejection(p: jax.Array, log_q: jax.Array, following: jax.Array) -> jax.Array:
    """1 - sum min(p, q): how often the token is refused, which is what drafting costs (Leviathan et al. 2023, 3.5)."""
    del following
    return 1.0 - jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1)


LOSSES = {"cross-entropy": cross_entropy, "kl": kl, "acceptance": rejection}
