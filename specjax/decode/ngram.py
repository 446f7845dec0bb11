"""Matching a sequence's suffix against its own past: what prompt lookup and the no-repeat rule both need."""

import jax
import jax.numpy as jnp
from jax import lax


def suffix_runs(tokens: jax.Array, end: jax.Array, longest: int | jax.Array) -> jax.Array:
    """How many tokens before each index repeat the tokens before ``end``.

    Args:
      tokens: i32[L], of which the first ``end`` count.
      end: i32[], the length of the sequence.
      longest: runs are counted up to this.

    Returns:
      i32[L]: at j < end, the largest r <= longest with tokens[j-r:j] == tokens[end-r:end]; 0 from ``end`` on.
    """
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)

    def extend(step, carry):
        runs, alive = carry
        before = jnp.roll(tokens, step)  # tokens[j - step] at j
        last = tokens[jnp.maximum(end - step, 0)]
        alive = alive & (before == last) & (index >= step)
        return runs + alive.astype(jnp.int32), alive

    runs, _ = lax.fori_loop(1, longest + 1, extend, (jnp.zeros_like(index), index < end))
    return runs
