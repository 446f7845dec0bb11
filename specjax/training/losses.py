"""Three losses of a drafter's q against the target's p, position by position.

D is the number of tokens that the drafter can draft, of the target's V tokens. p is given for these D tokens only. So p
sums to at most 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def cross_entropy(p: jax.Array, log_q: jax.Array, following: jax.Array) -> jax.Array:
    """-log q of the token that followed in the text. 0 if the drafter can't draft this token.

    Args:
      p: f32[..., D], the target's probabilities.
      log_q: f32[..., D], the logarithm of the drafter's probabilities.
      following: i32[...], the token that followed, as an index into the D tokens, or D for any other token.

    Returns:
      f32[...], in nats.
    """
    size = p.shape[-1]
    taken = jnp.take_along_axis(log_q, jnp.minimum(following, size - 1)[..., None], axis=-1)[..., 0]
    return jnp.where(following < size, -taken, 0.0)


def kl(p: jax.Array, log_q: jax.Array, following: jax.Array) -> jax.Array:
    """The cross entropy of q under p, in nats. It is KL(p, q) plus a constant (distillation, Hinton et al. 2015)."""
    del following
    return -jnp.sum(p * log_q, axis=-1)


def rejection(p: jax.Array, log_q: jax.Array, following: jax.Array) -> jax.Array:
    """1 - sum min(p, q), the probability that a drafted token is refused (Leviathan et al. 2023, theorem 3.5)."""
    del following
    return 1.0 - jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1)


LOSSES = {"cross-entropy": cross_entropy, "kl": kl, "acceptance": rejection}


class Lesson(NamedTuple):
    """The target's answers after each token of some texts, for a drafter of D tokens."""

    # f32[B, T, D] The target's probabilities of the D tokens, after each token of the text.
    p: jax.Array
    # i32[B, T] The target's likeliest token, as an index into the D tokens, or D for any other token.
    best: jax.Array
    # i32[B, T] The token that followed in the text, as an index of the same kind.
    following: jax.Array
    # f32[B, T] The weight of the token that followed.
    weights: jax.Array

    @classmethod
    def of(cls, logits: jax.Array, tokens: jax.Array, weights: jax.Array, drafted: jax.Array) -> "Lesson":
        """The lesson of some texts.

        Args:
          logits: f32[B, T, V], the target's logits after each token.
          tokens: i32[B, T], the texts.
          weights: f32[B, T], the weight of each token.
          drafted: i32[D], the target's ids of the tokens that the drafter can draft.
        """
        size = drafted.shape[0]
        place = jnp.full(logits.shape[-1], size).at[drafted].set(jnp.arange(size))
        p = jnp.exp(logits[..., drafted] - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
        later = ((0, 0), (0, 1))
        best = place[jnp.argmax(logits, axis=-1)]
        return cls(p, best, place[jnp.pad(tokens[:, 1:], later)], jnp.pad(weights[:, 1:], later))

    def after(self, count: int) -> "Lesson":
        """The lesson without the answers after the first ``count`` tokens."""
        return jax.tree.map(lambda x: x[:, count:], self)

    def terms(self, loss: str, log_q: jax.Array) -> dict[str, jax.Array]:
        """The loss of a drafter and two more figures, each a mean over tokens by weight.

        Args:
          loss: a name in ``LOSSES``.
          log_q: f32[B, T, D], the logarithm of the drafter's probabilities.

        Returns:
          "loss", "alpha" (the probability that a drafted token is accepted) and "greedy" (how often the likeliest
          tokens of target and drafter agree), each f32[].
        """
        return {
            "loss": mean(LOSSES[loss](self.p, log_q, self.following), self.weights),
            "alpha": mean(jnp.sum(jnp.minimum(self.p, jnp.exp(log_q)), axis=-1), self.weights),
            "greedy": mean(jnp.argmax(log_q, axis=-1) == self.best, self.weights),
        }


def mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """The weighted mean, f32[]. 0 if no weight is positive."""
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1e-6)


def combined(terms: list[dict[str, jax.Array]], scale: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Joins the figures of several terms.

    Args:
      terms: the figures of each term, as of :meth:`Lesson.terms`.
      scale: f32[terms], the weight of each term.

    Returns:
      The weighted mean loss f32[], and each figure of all terms, f32[terms].
    """
    rows = {name: jnp.stack([t[name] for t in terms]) for name in terms[0]}
    return jnp.sum(scale * rows["loss"]) / jnp.sum(scale), rows
