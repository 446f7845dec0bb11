"""The likeliest tokens at each position, with their log-probabilities under the model's raw logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Top(NamedTuple):
    """The n likeliest tokens at each position, the likeliest first. Among equals the lowest id is first."""

    # i32[B, T, n] The token ids.
    tokens: jax.Array
    # f32[B, T, n] The natural logarithms of their probabilities.
    logprobs: jax.Array


def likeliest(logprobs: jax.Array, count: int) -> Top:
    """The ``count`` likeliest tokens at each position.

    Args:
      logprobs: f32[B, T, V], the log-probability of each token.
      count: n, at most V.
    """
    values, tokens = lax.top_k(logprobs, count)
    return Top(tokens.astype(jnp.int32), values)
