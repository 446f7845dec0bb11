"""Finds the end of a sequence earlier in the same sequence. Prompt lookup and the no-repeat rule use this.

An example: the last three tokens of ``a b c d a b c`` also stand before index 3. The run at index 3 is therefore 3. The
token at index 3 is ``d``: this token followed ``a b c`` the first time.
"""

import jax
import jax.numpy as jnp
from jax import lax


def suffix_runs(tokens: jax.Array, end: jax.Array, longest: int | jax.Array) -> jax.Array:
    """For each index, the number of tokens before the index that are equal to the tokens before ``end``.

    Args:
      tokens: i32[L]. The first ``end`` tokens are the sequence; the rest is ignored.
      end: i32[], the length of the sequence.
      longest: the largest run that is counted.

    Returns:
      i32[L], the runs. At j < end the run is the largest r <= longest with tokens[j-r:j] == tokens[end-r:end]. At
      j >= end the run is 0.
    """
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    # No run is longer than the sequence. A Python integer stays a Python integer, so that the compiler knows how
    # often the loop runs.
    longest = min(longest, tokens.shape[0]) if isinstance(longest, int) else jnp.minimum(longest, end)

    def extend(step, carry):
        runs, alive = carry
        before = jnp.roll(tokens, step)  # tokens[j - step] at j
        last = tokens[jnp.maximum(end - step, 0)]
        alive = alive & (before == last) & (index >= step)
        return runs + alive.astype(jnp.int32), alive

    runs, _ = lax.fori_loop(1, longest + 1, extend, (jnp.zeros_like(index), index < end))
    return runs


SHORT = 3  # runs of up to this many tokens are counted at every index; longer ones only at candidates
GROUP = 64  # the number of candidates whose longer runs are counted at the same time
_BLOCK = 128  # the number of indices in a block; candidates are first counted block by block


def longest_match(tokens: jax.Array, end: jax.Array, longest: int) -> tuple[jax.Array, jax.Array]:
    """The longest run of :func:`suffix_runs` and its index. Among equally long runs, the latest one.

    Few indices have a run of ``SHORT`` tokens. These indices are the candidates. Runs longer than ``SHORT`` are counted
    at candidates only, from the latest candidate back, until a run of ``longest`` tokens is found. Therefore a large
    ``longest`` costs about as much as a small one.

    Args:
      tokens: i32[L]. The first ``end`` tokens are the sequence; the rest is ignored.
      end: i32[], the length of the sequence, at least 1.
      longest: the largest run that is counted.

    Returns:
      The run i32[], and its index i32[], which is below ``end``.
    """
    size = tokens.shape[0]
    runs = suffix_runs(tokens, end, min(longest, SHORT))
    index = jnp.arange(size, dtype=jnp.int32)
    first = jnp.argmax(runs * size + jnp.where(index < end, index, 0)).astype(jnp.int32)
    if longest <= SHORT:
        return runs[first], first
    latest_first = jnp.pad(jnp.flip(runs == SHORT), (0, -size % _BLOCK)).reshape(-1, _BLOCK)
    # The number of candidates up to the end of each block.
    ends = jnp.cumsum(jnp.sum(latest_first, axis=1, dtype=jnp.int32), dtype=jnp.int32)

    def goes_on(carry):
        seen, run, _ = carry
        return (seen < ends[-1]) & (run < longest)

    def look(carry):
        seen, run, place = carry
        places = size - 1 - _marked(latest_first, ends, seen)
        found = _runs_at(tokens, end, longest, places)
        best = jnp.argmax(found).astype(jnp.int32)
        better = found[best] > run
        return seen + GROUP, jnp.where(better, found[best], run), jnp.where(better, places[best], place)

    _, run, place = lax.while_loop(goes_on, look, (jnp.int32(0), runs[first], first))
    return run, place


def _marked(flags: jax.Array, ends: jax.Array, seen: jax.Array) -> jax.Array:
    """The indices of the next ``GROUP`` True flags after the first ``seen`` ones. -> i32[GROUP].

    Args:
      flags: bool[N, _BLOCK], read row by row.
      ends: i32[N], the number of True flags up to the end of each block. With ``ends`` no running sum over all flags is
        needed.
      seen: i32[], the number of True flags to pass over.

    Returns:
      The indices into the flattened flags. If fewer than ``GROUP`` flags are left, the rest are ``flags.size``.
    """
    wanted = seen + 1 + jnp.arange(GROUP, dtype=jnp.int32)
    block = jnp.sum(ends[None, :] < wanted[:, None], axis=1, dtype=jnp.int32)
    inside = jnp.minimum(block, flags.shape[0] - 1)
    block_flags = flags[inside]  # [GROUP, _BLOCK]
    rank = wanted - (ends[inside] - jnp.sum(block_flags, axis=1, dtype=jnp.int32))
    before = jnp.cumsum(block_flags, axis=1, dtype=jnp.int32) < rank[:, None]
    return jnp.where(block < flags.shape[0], block * _BLOCK + jnp.sum(before, axis=1, dtype=jnp.int32), flags.size)


def _runs_at(tokens: jax.Array, end: jax.Array, longest: int, places: jax.Array) -> jax.Array:
    """The runs at the indices ``places`` i32[GROUP]. An index below 0 has a run of 0. -> i32[GROUP]."""
    back = 1 + jnp.arange(longest, dtype=jnp.int32)
    before, last = places[:, None] - back[None, :], end - back
    same = (tokens[jnp.maximum(before, 0)] == tokens[jnp.maximum(last, 0)][None, :]) & (before >= 0)
    return jnp.sum(jnp.cumprod(same, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
