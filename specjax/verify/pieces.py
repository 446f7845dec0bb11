"""Small functions that verifiers and drafters share: q of a draft, acceptance, residual, and the target's own draw."""

import jax
import jax.numpy as jnp

from specjax.decode import random
from specjax.decode.arrays import leading_run, row_at, span, token_probs
from specjax.decode.types import Draft, Verdict


def draft_token_probs(draft: Draft) -> jax.Array:
    """q of each drafted token, f32[B, K]. A point mass has q = 1."""
    return jnp.ones(draft.tokens.shape, jnp.float32) if draft.probs is None else token_probs(draft.probs, draft.tokens)


def draft_probs(draft: Draft, vocab: int) -> jax.Array:
    """q at every drafted position, f32[B, K, V]. A point mass has a one-hot q. V is ``vocab``."""
    return jax.nn.one_hot(draft.tokens, vocab, dtype=jnp.float32) if draft.probs is None else draft.probs


def draft_entropy(draft: Draft, vocab: int) -> jax.Array:
    """The entropy of each drafted position's q over log V, f32[B, K] from 0 to 1. A point mass has entropy 0."""
    if draft.probs is None:
        return jnp.zeros(draft.tokens.shape, jnp.float32)
    return entropy(draft.probs)


def entropy(probs: jax.Array) -> jax.Array:
    """The entropy of distributions f32[..., V] over log V, f32[...] from 0 to 1."""
    return jnp.sum(jax.scipy.special.entr(probs), axis=-1) / jnp.log(jnp.float32(probs.shape[-1]))


def certainty(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The probability of tokens i32[...] in the softmax of logits f32[..., V], and the :func:`entropy` of this softmax.

    Both are f32[...]. The softmax is not written out, so no logarithm of V probabilities is needed.
    """
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    mass = jnp.exp(shifted)
    total = jnp.sum(mass, axis=-1)
    mean = jnp.sum(jnp.where(mass > 0, mass * shifted, 0.0), axis=-1) / total
    chosen = jnp.take_along_axis(shifted, tokens[..., None], axis=-1)[..., 0]
    return jnp.exp(chosen) / total, (jnp.log(total) - mean) / jnp.log(jnp.float32(logits.shape[-1]))


def told_confidence(draft: Draft) -> jax.Array:
    """``Draft.confidence``, f32[B, N]. If the drafter gives none: q of each token."""
    return draft_token_probs(draft) if draft.confidence is None else draft.confidence


def told_entropy(draft: Draft) -> jax.Array:
    """``Draft.entropy``, f32[B, N]. If the drafter gives none: the entropy of q, or NaN if the draft has no q."""
    if draft.entropy is not None:
        return draft.entropy
    return jnp.full(draft.tokens.shape, jnp.nan, jnp.float32) if draft.probs is None else entropy(draft.probs)


def accepts(u: jax.Array, p_x: jax.Array, q_x: jax.Array) -> jax.Array:
    """Whether x ~ q is accepted by the uniform draw u: with probability min(1, p(x) / q(x)). All are f32[...]."""
    return (q_x > 0) & (u * q_x < p_x)


def draft_at(draft: Draft, index: jax.Array, vocab: int) -> jax.Array:
    """q of drafted token ``index`` i32[B] of a chain, f32[B, V]. Past the end of a row's chain q is all zeros."""
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


def rest(p: jax.Array, q: jax.Array) -> jax.Array:
    """max(0, p - q) of p and q f32[B, V], not normalised."""
    return jnp.maximum(p - q, 0.0)


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """The :func:`rest` of p and q f32[B, V]. If rounding leaves only zeros, the result is p."""
    left = rest(p, q)
    return jnp.where(jnp.sum(left, axis=-1, keepdims=True) > 0, left, p)


def reject(p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array, lenience: float = 1.0) -> Verdict:
    """Accepts each token x of a chain with probability min(1, p(x) / (l q(x))), l being the lenience, until a refusal.

    The target's own token is drawn from norm(max(0, p - q)). The arguments are those of ``Verifier.verify``.
    """
    size = draft.tokens.shape[1]
    p_x, q_x = token_probs(p[:, :size], draft.tokens), draft_token_probs(draft)  # [B, K]
    u = random.uniform(random.at(random.fold(keys, random.ACCEPT), lengths[:, None] + span(size)))
    count = leading_run(draft.valid & accepts(u, p_x, lenience * q_x))
    q = draft_at(draft, count, p.shape[-1])
    return Verdict(count, draw_residual(keys, lengths + count, row_at(p, count), q))


def draw_residual(keys: jax.Array, positions: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """The :func:`draw` from the :func:`residual` of p and q f32[B, V], at positions i32[B]. -> i32[B].

    One search serves both cases, because a sum over the rest would be two kernels more. Tokens without rest take part
    too, so far below the others that they are drawn only if no token has a rest: Gumbel noise lies between -5 and 17,
    and a logarithm of a rest is at least -104.
    """
    left = rest(p, q)
    logs = jnp.where(left > 0, jnp.log(left), jnp.log(p) - 512)
    token_keys = random.at(random.fold(keys, random.TOKEN), positions[:, None])
    return jnp.argmax(logs + random.gumbel(token_keys, p.shape[-1])[:, 0], axis=-1).astype(jnp.int32)


def draw(keys: jax.Array, positions: jax.Array, probs: jax.Array) -> jax.Array:
    """The target's own draw at positions i32[B] from unnormalised ``probs`` f32[B, V]. -> i32[B]."""
    token_keys = random.at(random.fold(keys, random.TOKEN), positions[:, None])
    return random.categorical(token_keys, probs[:, None])[:, 0]
