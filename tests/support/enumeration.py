"""The exact law of a round on tables (tests/support/tables.py).

Every draft is one row of a batch, weighted with its probability, and the acceptance uniforms are integrated away.
"""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.types import Draft
from specjax.verify import Block, Lenient, Rejection, TypicalAcceptance, block
from specjax.verify import pieces as chain


def every_draft(p, q, size, first=0):
    """All drafts of ``size`` tokens: their probability f[N], p f32[N, K+1, V] and the Draft."""
    tokens = np.array(list(itertools.product(range(len(p)), repeat=size)))  # [N, K]
    before = np.concatenate([np.full((len(tokens), 1), first), tokens], 1)  # [N, K+1]
    weight = np.prod(q[before[:, :-1], tokens], axis=1)
    p_rows, q_rows = (jnp.asarray(x, jnp.float32) for x in (p[before], q[before[:, :-1]]))
    return weight, p_rows, Draft(jnp.asarray(tokens, jnp.int32), jnp.ones(tokens.shape, bool), q_rows)


def chain_rule(accept, rest_of):
    """P(count) and the drawn-from law of a verifier that judges token by token."""

    def law(p, draft):
        a = np.asarray(accept(p, draft), np.float64) * draft.valid  # [N, K]
        kept = np.cumprod(np.pad(a, ((0, 0), (1, 0)), constant_values=1), 1)  # [N, K+1]
        return kept * (1 - np.pad(a, ((0, 0), (0, 1)))), rest_of

    return law


@jax.jit
def residual_at(p, draft, count):
    return chain.residual(chain.row_at(p, count), chain.draft_at(draft, count, p.shape[-1]))


@jax.jit
def ratio(p, draft, lenience=1.0):
    p_x, q_x = chain.token_probs(p[:, :-1], draft.tokens), chain.draft_token_probs(draft)
    return jnp.where(q_x > 0, jnp.minimum(1, p_x / jnp.where(q_x > 0, lenience * q_x, 1)), 0)


@jax.jit
def block_thresholds(p, draft):
    return block.thresholds(p, draft, block.weights(p, draft))


@jax.jit
def block_remainder(p, draft, count):
    return block.remainder(p, draft, block.weights(p, draft), count)


def block_law(p, draft):
    h = np.asarray(block_thresholds(p, draft), np.float64)  # [N, K]
    refused = np.cumprod(np.pad(1 - h, ((0, 0), (0, 1)), constant_values=1)[:, ::-1], 1)[:, ::-1]  # of all longer
    return np.pad(h, ((0, 0), (1, 0)), constant_values=1) * refused, block_remainder


@jax.jit
def typical_at(p, draft, epsilon=0.09, delta=0.3):
    p_x = chain.token_probs(p[:, :-1], draft.tokens)
    entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0), -1)[:, :-1]
    return p_x > jnp.minimum(epsilon, delta * jnp.exp(-entropy))


LAWS = {
    Rejection(): chain_rule(ratio, residual_at),
    Block(): block_law,
    **{Lenient(x): chain_rule(functools.partial(ratio, lenience=x), residual_at) for x in (1.0, 0.5, 0.3, 0.1)},
    TypicalAcceptance(): chain_rule(typical_at, jax.jit(lambda p, draft, count: chain.row_at(p, count))),
}


def outcomes(verifier, weight, p, draft):
    """What a round commits, with its probability: pairs (tuple of tokens, float), and the expected count."""
    counts, rest_of = LAWS[verifier](p, draft)  # [N, K+1]
    committed, tokens, mean = collections.Counter(), np.asarray(draft.tokens).tolist(), 0.0
    for i in range(counts.shape[1]):
        rest = np.asarray(rest_of(p, draft, jnp.full(len(tokens), i, jnp.int32)), np.float64)
        rest = rest / np.maximum(rest.sum(1, keepdims=True), 1e-300)
        mean += i * float(weight @ counts[:, i])
        for n in np.flatnonzero(weight * counts[:, i]):
            for y in np.flatnonzero(rest[n]).tolist():
                committed[*tokens[n][:i], y] += weight[n] * counts[n, i] * rest[n, y]
    return list(committed.items()), mean


def joint_law(verifier, p, q, size, length) -> np.ndarray:
    """The exact law of the first ``length`` tokens after token 0, round after round."""
    rounds = {t: outcomes(verifier, *every_draft(p, q, size, t))[0] for t in range(len(p))}
    law = np.zeros((len(p),) * length)

    def go_on(text, prob, last):
        if len(text) >= length:
            law[text[:length]] += prob
            return
        for tokens, chance in rounds[last]:
            go_on((*text, *tokens), prob * chance, tokens[-1])

    go_on((), 1.0, 0)
    return law
