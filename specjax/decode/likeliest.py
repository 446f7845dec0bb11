"""The likeliest tokens at each position, with their log-probabilities under the model's raw logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Top(NamedTuple):
    """The n likeliest tokens at each position, the likeliest first; of equal ones the lowest id first."""

    tokens: jax.Array  # i32[B, T, n]
    logprobs: jax.Array  # f32[B, T, n], natural logarithms


def likeliest(logprobs: jax.Array, count: int) -> Top:
    """The ``count`` largest of f32[B, T, V]."""
    values, tokens = lax.top_k(logprobs, count)
    return Top(tokens.astype(jnp.int32), values)
