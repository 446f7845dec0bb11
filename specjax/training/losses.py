"""What a drafter is trained to: three losses of its q against the target's p, position by position.

D drafted tokens of the target's V: p is given on those D alone, so it sums to at most 1.
"""

from typing import NamedTuple

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


class Lesson(NamedTuple):
    """What the target says after each token of texts, as far as a drafter of D tokens can learn it."""

    p: jax.Array  # f32[B, T, D]
    best: jax.Array  # i32[B, T] its likeliest token as an index into the D, or D
    following: jax.Array  # i32[B, T] the token that followed, likewise
    weights: jax.Array  # f32[B, T] of that token

    @classmethod
    def of(cls, logits: jax.Array, tokens: jax.Array, weights: jax.Array, drafted: jax.Array) -> "Lesson":
        """From the target's logits f32[B, T, V] on texts i32[B, T], weights f32[B, T], for drafted tokens i32[D]."""
        size = drafted.shape[0]
        place = jnp.full(logits.shape[-1], size).at[drafted].set(jnp.arange(size))
        p = jnp.exp(logits[..., drafted] - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
        later = ((0, 0), (0, 1))
        best = place[jnp.argmax(logits, axis=-1)]
        return cls(p, best, place[jnp.pad(tokens[:, 1:], later)], jnp.pad(weights[:, 1:], later))

    def after(self, count: int) -> "Lesson":
        """Without the first ``count`` tokens."""
        return jax.tree.map(lambda x: x[:, count:], self)

    def terms(self, loss: str, log_q: jax.Array) -> dict[str, jax.Array]:
        """The mean loss of log q f32[B, T, D], the acceptance, and how often the likeliest tokens agree."""
        return {
            "loss": mean(LOSSES[loss](self.p, log_q, self.following), self.weights),
            "alpha": mean(jnp.sum(jnp.minimum(self.p, jnp.exp(log_q)), axis=-1), self.weights),
            "greedy": mean(jnp.argmax(log_q, axis=-1) == self.best, self.weights),
        }


def mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """The mean by weight, f32[]; 0 without any weight."""
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1e-6)


def combined(terms: list[dict[str, jax.Array]], scale: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mean loss of several terms by weights f32[terms], and all figures in rows."""
    rows = {name: jnp.stack([t[name] for t in terms]) for name in terms[0]}
    return jnp.sum(scale * rows["loss"]) / jnp.sum(scale), rows
