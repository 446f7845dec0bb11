"""The likeliest tokens at each position: the largest numbers of wide rows, and log-probabilities of the raw logits."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.models import tuning


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

    XLA's kernel for a GPU gives each row one of the card's many processors. So for a small k all processors share a
    row: each keeps a sorted list of k numbers, and the lists are merged. Else the k largest of each block are found
    first, and then the k largest of these. Equal numbers keep their order, so the result is the same.

    Args:
      x: f32[..., V]. NaN counts as -inf, and -0.0 as 0.0.
      k: at most V.
    """
    x, size = jnp.where(jnp.isnan(x), -jnp.inf, x) + 0.0, x.shape[-1]  # + 0.0 turns -0.0 into 0.0
    if tuning.merges_lists(k):
        return _merged_lists(x, k)
    if size < 4 * BLOCK or k > BLOCK:
        return lax.top_k(x, k)
    blocks = -(-size // BLOCK)
    padded = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, blocks * BLOCK - size),), constant_values=-jnp.inf)
    values, places = lax.top_k(padded.reshape(*x.shape[:-1], blocks, BLOCK), k)
    places += BLOCK * lax.broadcasted_iota(jnp.int32, places.shape, places.ndim - 2)
    best, of_best = lax.top_k(values.reshape(*x.shape[:-1], blocks * k), k)
    return best, jnp.take_along_axis(places.reshape(*x.shape[:-1], blocks * k), of_best, axis=-1)


def _merged_lists(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """:func:`top_k` as one reduction. What is reduced are sorted lists of k numbers and their places.

    Each number begins as a list of its own, filled up by -inf at places past all others.
    """
    places = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    far, nowhere = np.float32(-np.inf), np.int32(np.iinfo(np.int32).max)
    filling = [jnp.full_like(x, far)] * (k - 1), [jnp.full_like(places, nowhere)] * (k - 1)

    def merged(a: tuple, b: tuple) -> tuple:
        lists = (list(zip(both[:k], both[k:], strict=True)) for both in (a, b))
        return tuple(x for part in zip(*_best_of(*lists), strict=True) for x in part)

    found = lax.reduce((x, *filling[0], places, *filling[1]), (far,) * k + (nowhere,) * k, merged, (x.ndim - 1,))
    return jnp.stack(found[:k], axis=-1), jnp.stack(found[k:], axis=-1)


def _best_of(a: list[tuple], b: list[tuple]) -> list[tuple]:
    """The n best of two sorted lists of n pairs, sorted: a bitonic merge (Batcher 1968).

    The better of a's i-th and b's i-th from the end are the n best. They fall, and then they rise. Pairs that stand
    half the list apart are put in order, then pairs a quarter apart, and so on. Where n is no power of two, the list is
    as if better pairs stood in front of it, which stay where they are.
    """
    n = len(a)
    best = [_in_order(x, y)[0] for x, y in zip(a, reversed(b), strict=True)]
    whole = 1 << (n - 1).bit_length()
    apart = whole // 2
    while apart:
        for i in range(n - apart):
            if not (i + whole - n) & apart:
                best[i], best[i + apart] = _in_order(best[i], best[i + apart])
        apart //= 2
    return best


def _in_order(a: tuple, b: tuple) -> tuple[tuple, tuple]:
    """Two pairs of a number and its place, the larger number first. Of equal numbers, the one at the lower place."""
    first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return tuple(map(partial(jnp.where, first), a, b)), tuple(map(partial(jnp.where, first), b, a))


def likeliest(logprobs: jax.Array, count: int) -> Top:
    """The ``count`` likeliest tokens at each position.

    Args:
      logprobs: f32[B, T, V], the log-probability of each token.
      count: n, at most V.
    """
    values, tokens = top_k(logprobs, count)
    return Top(tokens.astype(jnp.int32), values)
