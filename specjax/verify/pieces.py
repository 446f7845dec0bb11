"""Pieces that the chain verifiers share."""

import jax
import jax.numpy as jnp

from specjax.decode import random
from specjax.decode.arrays import row_at, token_probs
from specjax.decode.types import Draft


def draft_token_probs(draft: Draft) -> jax.Array:
    """q of each drafted token, f32[B, K]: 1 for point masses."""
    return jnp.ones(draft.tokens.shape, jnp.float32) if draft.probs is None else token_probs(draft.probs, draft.tokens)


def draft_probs(draft: Draft, vocab: int) -> jax.Array:
    """q at every drafted position, f32[B, K, V]: one-hot for point masses."""
    return jax.nn.one_hot(draft.tokens, vocab, dtype=jnp.float32) if draft.probs is None else draft.probs


def draft_entropy(draft: Draft, vocab: int) -> jax.Array:
    """Entropy of each drafted position's q over log V, f32[B, K] from 0 to 1: 0 for point masses."""
    if draft.probs is None:
        return jnp.zeros(draft.tokens.shape, jnp.float32)
    return entropy(draft.probs)


def entropy(law: jax.Array) -> jax.Array:
    """Entropy of laws f32[..., V] over log V, f32[...] from 0 to 1."""
    return jnp.sum(jax.scipy.special.entr(law), axis=-1) / jnp.log(jnp.float32(law.shape[-1]))


def certainty(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The probability of tokens i32[...] in the softmax of logits f32[..., V], and that law's :func:`entropy`.

    Both f32[...]. The law itself is not made: this needs no logarithm for each of V tokens.
    """
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    mass = jnp.exp(shifted)
    total = jnp.sum(mass, axis=-1)
    mean = jnp.sum(jnp.where(mass > 0, mass * shifted, 0.0), axis=-1) / total
    own = jnp.take_along_axis(shifted, tokens[..., None], axis=-1)[..., 0]
    return jnp.exp(own) / total, (jnp.log(total) - mean) / jnp.log(jnp.float32(logits.shape[-1]))


def told_confidence(draft: Draft) -> jax.Array:
    """``Draft.confidence``, f32[B, N]; q of each token if the drafter doesn't say."""
    return draft_token_probs(draft) if draft.confidence is None else draft.confidence


def told_entropy(draft: Draft) -> jax.Array:
    """``Draft.entropy``, f32[B, N]; that of q if the drafter doesn't say, NaN if there is no q either."""
    if draft.entropy is not None:
        return draft.entropy
    return jnp.full(draft.tokens.shape, jnp.nan, jnp.float32) if draft.probs is None else entropy(draft.probs)


def accepts(u: jax.Array, p_x: jax.Array, q_x: jax.Array) -> jax.Array:
    """Whether x ~ q is accepted by uniform draws u, all f32[...]: with probability min(1, p(x) / q(x))."""
    return (q_x > 0) & (u * q_x < p_x)


def draft_at(draft: Draft, index: jax.Array, vocab: int) -> jax.Array:
    """q at node index i32[B], f32[B, V]: all zeros past the end of a row's chain."""
    size = draft.tokens.shape[1]
    if size == 0:
        return jnp.zeros((index.shape[0], vocab), jnp.float32)
    inside = jnp.minimum(index, size - 1)
    if draft.probs is None:
        q = jax.nn.one_hot(row_at(draft.tokens, inside), vocab, dtype=jnp.float32)
    else:
        q = row_at(draft.probs, inside)
    drafted = (index < size) & row_at(draft.valid, inside)
    return jnp.where(drafted[:, None], q, 0.0)


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """max(0, p - q) of f32[B, V], unnormalised; p itself where rounding leaves nothing."""
    rest = jnp.maximum(p - q, 0.0)
    return jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, p)


def draw(keys: jax.Array, positions: jax.Array, probs: jax.Array) -> jax.Array:
    """The target's own draw at positions i32[B] from unnormalised probs f32[B, V]. -> i32[B]."""
    where = random.at(random.fold(keys, random.TOKEN), positions[:, None])
    return random.categorical(where, probs[:, None])[:, 0]
