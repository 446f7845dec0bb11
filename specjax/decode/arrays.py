"""Small array helpers that every part of decoding shares."""

import jax
import jax.numpy as jnp
from jax import lax


def span(size: int) -> jax.Array:
    """0, 1, ..., size - 1 as one row that broadcasts over a batch, i32[1, size]."""
    return jnp.arange(size, dtype=jnp.int32)[None]


def row_at(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[b, index[b]] of x[B, N, ...] and i32[B]. -> [B, ...]."""
    return jnp.take_along_axis(x, index.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)[:, 0]


def rows_at(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[b, index[b, t]] of x[B, N, ...] and i32[B, T]. -> [B, T, ...]."""
    return jax.vmap(lambda row, places: row[places])(x, index)


def largest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest number f32[...] of each row of f32[..., V], and its place i32[...], in one search.

    Of several largest numbers the first counts, and NaN counts as larger than any number, as in ``jnp.argmax``.
    """

    def larger(a, b):
        (x, i), (y, j) = a, b
        more = (x > y) | jnp.isnan(x) & ~jnp.isnan(y)
        alike = (x == y) | jnp.isnan(x) & jnp.isnan(y)
        first = more | alike & (i < j)
        return jnp.where(first, x, y), jnp.where(first, i, j)

    places = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    start = jnp.asarray(-jnp.inf, x.dtype), jnp.int32(x.shape[-1])
    return tuple(lax.reduce((x, places), start, larger, (x.ndim - 1,)))


def token_probs(probs: jax.Array, tokens: jax.Array) -> jax.Array:
    """probs[B, K, V] of tokens i32[B, K]. -> f32[B, K]."""
    return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]


def leading_run(flags: jax.Array) -> jax.Array:
    """Length of the leading run of True in bool[B, K]. -> i32[B]."""
    return jnp.sum(jnp.cumprod(flags, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)


def where_rows(rows: jax.Array, a, b):
    """``a`` in the rows of bool[B] and ``b`` in the others, for any two alike trees of arrays with rows first."""
    return jax.tree.map(lambda x, y: jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), x, y), a, b)


def fitted(x: jax.Array, size: int) -> jax.Array:
    """x[B, T, ...] with zeros after it, or cut. -> [B, size, ...]."""
    missing = max(0, size - x.shape[1])
    return jnp.pad(x, ((0, 0), (0, missing), *((0, 0) for _ in x.shape[2:])))[:, :size]
