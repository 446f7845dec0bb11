"""Proposals of drafters that look at the rows' texts alone."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class State(NamedTuple):
    tokens: jax.Array
    lengths: jax.Array
    cache: None = None


PROPOSE = jax.jit(
    lambda drafter, state, size: drafter.propose(None, (), state, None, size)[0], static_argnames="size"
)


def propose(drafter, texts, size):
    """For each text of at most 32 tokens, the tokens that the drafter proposes, ``size`` at most."""
    tokens, lengths = jnp.array([t + [0] * (32 - len(t)) for t in texts]), jnp.array([len(t) for t in texts])
    draft = PROPOSE(drafter, State(tokens, lengths), size)
    return [[int(t) for t, v in zip(*row, strict=True) if v] for row in zip(draft.tokens, draft.valid, strict=True)]
