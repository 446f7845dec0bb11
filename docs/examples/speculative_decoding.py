"""Speculative decoding of one text: the whole method in pure JAX, without batches, caches, widths or trees.

A draft proposes K tokens. The target judges all of them after one call. The text then follows the target's own law
(Leviathan et al. 2023, algorithm 1). specjax runs the same method for many texts at once in specjax/decode/round.py and
specjax/verify/rejection.py. tests/scripts/test_documents.py holds both to equal tokens.

``target`` and ``draft`` are functions from n tokens to probabilities f32[n, V]: row i is the law of the token after
token i. Run this file to see that the second token of many texts has the target's law.
"""

import jax
import jax.numpy as jnp

TOKEN, DRAFT, ACCEPT = 0, 1, 2  # what a random draw is for, as in specjax/decode/random.py


def key_at(key, purpose, position):
    """Each draw has an address: the text's key, the purpose, the position. No key is ever used for two purposes."""
    return jax.random.fold_in(jax.random.fold_in(key, purpose), position)


def draw(key, purpose, position, weights):
    """A token with probability proportional to weights f32[V], by the Gumbel trick. The weights need no sum of 1."""
    noise = jax.random.gumbel(key_at(key, purpose, position), weights.shape)
    return int(jnp.argmax(jnp.log(weights) + noise))


def one_round(target, draft, tokens, size, key):
    """The text after one round: ``tokens``, the accepted ones of ``size`` drafted tokens, and one of the target's own.

    Args:
      target, draft: functions from a list of n tokens to probabilities f32[n, V].
      tokens: the text so far, a list of at least one token.
      size: K, how many tokens are drafted.
      key: the text's random key. It is the same in every round, because draws are addressed by position.
    """
    start = len(tokens)
    drafted, q = [], []  # the drafted tokens, and the law f32[V] that each was drawn from
    for position in range(start, start + size):
        q.append(draft(tokens + drafted)[-1])
        drafted.append(draw(key, DRAFT, position, q[-1]))

    p = target(tokens + drafted)[start - 1 :]  # f32[K+1, V], one call: the law at each drafted token, and after all

    for i, x in enumerate(drafted):
        u = jax.random.uniform(key_at(key, ACCEPT, start + i))
        if u * q[i][x] < p[i][x]:  # x is accepted with probability min(1, p(x) / q(x))
            continue
        residual = jnp.maximum(p[i] - q[i], 0)  # what the draft gave too little of
        return tokens + drafted[:i] + [draw(key, TOKEN, start + i, residual)]  # the correction; the rest is dropped
    return tokens + drafted + [draw(key, TOKEN, start + size, p[size])]  # the bonus


if __name__ == "__main__":
    p, q = jnp.array([0.6, 0.3, 0.1]), jnp.array([0.2, 0.2, 0.6])  # whatever the text before
    target, draft = (lambda tokens, law=law: jnp.tile(law, (len(tokens), 1)) for law in (p, q))
    second = [one_round(target, draft, [0], 1, jax.random.key(seed))[1] for seed in range(300)]
    print(f"drafted by {q}, wanted {p}, got {jnp.bincount(jnp.array(second), length=3) / 300}")
