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


SHORT = 3  # runs up to this are counted at every index
GROUP = 64  # indices looked at together, where runs are longer
_BLOCK = 128  # indices whose candidates are counted together


def longest_match(tokens: jax.Array, end: jax.Array, longest: int) -> tuple[jax.Array, jax.Array]:
    """Where the tokens before ``end`` stood before: the longest run of :func:`suffix_runs`, the latest among equals.

    Few indices have a run of ``SHORT`` tokens. Only their runs are followed further, latest first, until one is
    ``longest``: a large ``longest`` costs about as much as a small one.

    Args:
      tokens: i32[L], of which the first ``end`` count.
      end: i32[], the length of the sequence, at least 1.
      longest: runs are counted up to this.

    Returns:
      The run i32[], and its index i32[] below ``end``.
    """
    size = tokens.shape[0]
    runs = suffix_runs(tokens, end, min(longest, SHORT))
    index = jnp.arange(size, dtype=jnp.int32)
    first = jnp.argmax(runs * size + jnp.where(index < end, index, 0)).astype(jnp.int32)
    if longest <= SHORT:
        return runs[first], first
    latest_first = jnp.pad(jnp.flip(runs == SHORT), (0, -size % _BLOCK)).reshape(-1, _BLOCK)
    ends = jnp.cumsum(jnp.sum(latest_first, axis=1, dtype=jnp.int32), dtype=jnp.int32)  # candidates up to each block

    def goes_on(carry):
        seen, run, _ = carry
        return (seen < ends[-1]) & (run < longest)

    def look(carry):
        seen, run, at = carry
        places = size - 1 - _marked(latest_first, ends, seen)
        found = _runs_at(tokens, end, longest, places)
        best = jnp.argmax(found).astype(jnp.int32)
        better = found[best] > run
        return seen + GROUP, jnp.where(better, found[best], run), jnp.where(better, places[best], at)

    _, run, at = lax.while_loop(goes_on, look, (jnp.int32(0), runs[first], first))
    return run, at


def _marked(flags: jax.Array, ends: jax.Array, seen: jax.Array) -> jax.Array:
    """Where in bool[N, _BLOCK], read in order, the ``GROUP`` True after the first ``seen`` stand. -> i32[GROUP].

    Past the last True it is the size of the whole. ``ends`` i32[N] counts the True up to the end of each block: that
    spares a running sum over the whole.
    """
    wanted = seen + 1 + jnp.arange(GROUP, dtype=jnp.int32)
    block = jnp.sum(ends[None, :] < wanted[:, None], axis=1, dtype=jnp.int32)
    inside = jnp.minimum(block, flags.shape[0] - 1)
    own = flags[inside]  # [GROUP, _BLOCK]
    rank = wanted - (ends[inside] - jnp.sum(own, axis=1, dtype=jnp.int32))
    before = jnp.cumsum(own, axis=1, dtype=jnp.int32) < rank[:, None]
    return jnp.where(block < flags.shape[0], block * _BLOCK + jnp.sum(before, axis=1, dtype=jnp.int32), flags.size)


def _runs_at(tokens: jax.Array, end: jax.Array, longest: int, places: jax.Array) -> jax.Array:
    """The runs at some places i32[GROUP], of which those below 0 have none. -> i32[GROUP]."""
    back = 1 + jnp.arange(longest, dtype=jnp.int32)
    own, last = places[:, None] - back[None, :], end - back
    same = (tokens[jnp.maximum(own, 0)] == tokens[jnp.maximum(last, 0)][None, :]) & (own >= 0)
    return jnp.sum(jnp.cumprod(same, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
