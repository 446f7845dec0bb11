"""Small array helpers that every part of decoding shares."""

import jax
import jax.numpy as jnp


def span(size: int) -> jax.Array:
    """0, 1, ..., size - 1 as one row that broadcasts over a batch, i32[1, size]."""
    return jnp.arange(size, dtype=jnp.int32)[None]
