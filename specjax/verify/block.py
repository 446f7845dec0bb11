"""Block verification: the draft is judged as a whole. On average this keeps at least as many tokens as one by one.

Source: Sun et al. 2024, "Block verification accelerates speculative decoding" (arXiv 2403.10444). A row's chain ends at
its last valid token. The paper's draft length K is here this length, which differs between rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode import random
from specjax.decode.arrays import row_at, span, token_probs
from specjax.decode.types import Draft, Verdict
from specjax.verify import pieces as chain


@dataclasses.dataclass(frozen=True)
class Block:
    """Keeps the longest prefix with u_i < h_i, then draws from norm(max(0, w_i p - q)).

    i is the number of tokens in the prefix. The u_i are uniform and independent, the h_i are :func:`thresholds`, and
    the w_i are :func:`weights`.
    """

    lossless = True
    trees = False

    # The number of kept tokens depends on drafted tokens and uniforms past the cut: if i tokens were kept, then
    # u_j >= h_j for every j > i. If a later round used the same u_j, or drafted with the same noise, its draws would be
    # biased. So the keys of both are folded with the row's length at the start of the round. The token after the cut
    # needs no such key: the target draws at a position at most once, and then commits the token.
    def draft_keys(self, keys: jax.Array, lengths: jax.Array) -> jax.Array:
        return random.fold(random.fold(keys, random.DRAFT), lengths)

    def verify(self, p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
        size = draft.tokens.shape[1]
        w = weights(p, draft)  # [B, K+1]
        h = thresholds(p, draft, w)  # [B, K]
        positions = lengths[:, None] + span(size)
        u = random.uniform(random.at(random.fold(random.fold(keys, random.ACCEPT), lengths), positions))
        count = jnp.max(jnp.where(u < h, jnp.arange(1, size + 1, dtype=jnp.int32)[None], 0), axis=1, initial=0)
        rest = remainder(p, draft, w, count)
        return Verdict(count, chain.draw(keys, lengths + count, rest))


def weights(p: jax.Array, draft: Draft) -> jax.Array:
    """w_i, the probability that at least i drafted tokens are kept, given the first i of them.

    w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)). The logarithm of w_i is a walk that is held at or below 0: the
    free walk minus the highest point of the free walk so far.

    Args:
      p: f32[B, K+1, V], the target's probabilities.
      draft: the draft.

    Returns:
      f32[B, K+1]: exactly 1 if p = q at all tokens so far, and 0 past the end of a row's chain.
    """
    p_x = token_probs(p[:, :-1], draft.tokens)  # [B, K]
    q_x = chain.draft_token_probs(draft)  # [B, K]
    possible = draft.valid & (q_x > 0) & (p_x > 0)
    steps = jnp.where(possible, jnp.log(p_x) - jnp.log(q_x), -jnp.inf)
    free = jnp.cumsum(jnp.pad(steps, ((0, 0), (1, 0))), axis=1)  # [B, K+1]
    return jnp.exp(free - lax.cummax(free, axis=1))


def thresholds(p: jax.Array, draft: Draft, w: jax.Array) -> jax.Array:
    """h_1 to h_K: h_i is the probability that i tokens are kept, given that every longer prefix was refused.

    h_i = r_i / (r_i + 1 - w_i) with r_i = sum_x max(0, w_i p(x) - q(x)). At the end of the chain h_i = w_i.

    Args:
      p: f32[B, K+1, V], the target's probabilities.
      draft: the draft.
      w: f32[B, K+1], the :func:`weights`.

    Returns:
      f32[B, K].
    """
    w = w[:, 1:]  # [B, K]
    inner = w[:, :-1]  # [B, K-1]
    q = chain.draft_probs(draft, p.shape[-1])
    r = jnp.sum(jnp.maximum(inner[..., None] * p[:, 1:-1] - q[:, 1:], 0.0), axis=-1)  # [B, K-1]
    h = jnp.where(inner < 1, r / (r + 1 - inner), 1.0)  # w = 1 gives r / r; if p = q this is 0/0
    return jnp.concatenate([jnp.where(draft.valid[:, 1:], h, inner), w[:, -1:]], axis=1)


def remainder(p: jax.Array, draft: Draft, w: jax.Array, count: jax.Array) -> jax.Array:
    """The unnormalised distribution of the target's own token after ``count`` kept tokens: max(0, p - q/w).

    Args:
      p: f32[B, K+1, V], the target's probabilities.
      draft: the draft.
      w: f32[B, K+1], the :func:`weights`.
      count: i32[B], the number of kept tokens.

    Returns:
      f32[B, V].
    """
    scale = jnp.maximum(row_at(w, count), jnp.finfo(jnp.float32).tiny)[:, None]
    return chain.residual(row_at(p, count), chain.draft_at(draft, count, p.shape[-1]) / scale)
