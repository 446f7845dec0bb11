"""The likeliest tokens at each position: the largest numbers of wide rows, and log-probabilities of the raw logits."""

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


# The width of the blocks in which :func:`top_k` first looks. It is the least width for which XLA has a kernel on a GPU.
BLOCK = 1024


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """``lax.top_k`` over the last axis, fast for the few wide rows of a vocabulary. -> values and i32 indices [..., k].

    XLA's kernel for a GPU gives each row one of the card's many processors. So the k largest of each block are found
    first, and then the k largest of these. Equal numbers keep their order, so the result is the same.

    Args:
      x: f32[..., V].
      k: at most V.
    """
    size = x.shape[-1]
    if size < 4 * BLOCK or k > BLOCK:
        return lax.top_k(x, k)
    blocks = -(-size // BLOCK)
    padded = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, blocks * BLOCK - size),), constant_values=-jnp.inf)
    values, places = lax.top_k(padded.reshape(*x.shape[:-1], blocks, BLOCK), k)
    places += BLOCK * lax.broadcasted_iota(jnp.int32, places.shape, places.ndim - 2)
    best, of_best = lax.top_k(values.reshape(*x.shape[:-1], blocks * k), k)
    return best, jnp.take_along_axis(places.reshape(*x.shape[:-1], blocks * k), of_best, axis=-1)


def likeliest(logprobs: jax.Array, count: int) -> Top:
    """The ``count`` likeliest tokens at each position.

    Args:
      logprobs: f32[B, T, V], the log-probability of each token.
      count: n, at most V.
    """
    values, tokens = top_k(logprobs, count)
    return Top(tokens.astype(jnp.int32), values)
