"""Drawing a chain of K tokens from anything that gives next-token logits: what all sampled drafts share."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode import random, sampling
from specjax.decode.arrays import span
from specjax.decode.numeric import STRONGEST, in_range
from specjax.decode.types import DecodeState, Draft
from specjax.verify import pieces as chain

# (carry, token before the last i32[B], last token i32[B], its position i32[B]) -> (logits f32[B, V'], carry)
NextLogits = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


def draw_chain(
    next_logits: NextLogits,
    carry: Any,
    state: DecodeState,
    keys: jax.Array,
    num_speculative_tokens: int,
    vocab: int,
    temperature: float | None = None,
    first: NextLogits | None = None,
) -> tuple[Draft, Any]:
    """K tokens one after another, each under the request's own sampling transforms; one ``lax.scan``.

    Args:
      next_logits: one draft step.
      carry: what the steps pass on, a cache for instance.
      state: the round's.
      keys: key[B] to draw with.
      num_speculative_tokens: K, at least 1.
      vocab: V, the target's vocabulary size; logits of fewer or more tokens are fitted to it.
      temperature: replaces the request's.
      first: the first step, where that does more than the others; it and they are then two programs.

    Returns:
      The draft with its q, f32[B, K, V], and the last carry.
    """
    params = at_temperature(state.request.sampling, temperature)

    def step(next_logits, all_carry, i):
        carry, previous, last, drafted = all_carry
        position = state.lengths - 1 + i  # of the last token
        logits, carry = next_logits(carry, previous, last, position)
        context = state.context(drafted[:, None])
        logits = fit(logits, vocab)[:, None]
        scores = sampling.ranked(logits, params, context)  # [B, 1, V]
        at = random.at(keys, position[:, None] + 1)
        token = jnp.argmax(noisy(scores, params, at), axis=-1).astype(jnp.int32)[:, 0]
        drafted = jnp.where(span(num_speculative_tokens) == i, token[:, None], drafted)
        # Computed only if some policy looks at it.
        sure = chain.certainty(sampling.unsharpened(logits, params, context)[:, 0], token)
        return (carry, last, token, drafted), (token, scores[:, 0], sure)

    rows = jnp.arange(state.lengths.shape[0], dtype=jnp.int32)
    last = state.tokens[rows, state.lengths - 1]
    previous = state.tokens[rows, jnp.maximum(state.lengths - 2, 0)]
    nothing = jnp.full((rows.shape[0], num_speculative_tokens), sampling.NO_TOKEN, jnp.int32)
    steps = jnp.arange(num_speculative_tokens, dtype=jnp.int32)
    passed: Any = (carry, previous, last, nothing)
    drawn = []  # tokens i32[steps, B], scores f32[steps, B, V], confidence and entropy f32[steps, B]
    if first is not None:
        passed, one = step(first, passed, steps[0])
        drawn, steps = [jax.tree.map(lambda x: x[None], one)], steps[1:]
    if len(steps):
        passed, rest = lax.scan(partial(step, next_logits), passed, steps)
        drawn.append(rest)
    carry = passed[0]
    parts = jax.tree.map(lambda *parts: jnp.concatenate(parts).swapaxes(0, 1), *drawn)
    tokens, scores, (confidence, entropy) = parts  # [B, K], [B, K, V]
    # What each was drawn from is written out for all of them at once: the steps themselves need no sums.
    q = sampling.normalised(scores)
    valid = jnp.isfinite(q[..., 0])
    q = jnp.where(is_greedy(params), jax.nn.one_hot(tokens, vocab, dtype=jnp.float32), q)
    return Draft(tokens, valid, q, confidence=confidence, entropy=entropy), carry


def noisy(scores: jax.Array, params: sampling.SamplingParams, keys: jax.Array) -> jax.Array:
    """What :func:`sampling.ranked` gave, f32[B, T, V], with the Gumbel noise of key[B, T]: the largest is a draw.

    At temperature 0 it is without noise: the largest is the best token, the lowest-numbered of several.
    """
    return scores + jnp.where(is_greedy(params), 0.0, random.gumbel(keys, scores.shape[-1]))


def is_greedy(params: sampling.SamplingParams) -> jax.Array:
    """bool[B, 1, 1], whether a row's temperature is 0."""
    return (params.temperature == 0)[:, None, None]


def at_temperature(params: sampling.SamplingParams, temperature: float | None) -> sampling.SamplingParams:
    """The request's parameters, unless another temperature is given."""
    if temperature is None:
        return params
    return params._replace(temperature=jnp.full_like(params.temperature, temperature))


def check_temperature(temperature: Any) -> None:
    """Raises ValueError for a number that can't replace a request's temperature."""
    if isinstance(temperature, float | int) and not in_range(temperature, 0, STRONGEST):
        raise ValueError(f"draft temperature must be a number from 0 to {STRONGEST:g}, got {temperature!r}")


def spreading(tokens: jax.Array | None, vocab: int) -> Callable[[jax.Array], jax.Array]:
    """From logits f32[..., D] of the tokens i32[D] to those of a whole vocabulary, f32[..., V]: others can't be drawn.

    Made once a round: the scatter is a slow kernel, so every step's logits are gathered. Without tokens D is V.
    """
    if tokens is None:
        return lambda logits: fit(logits, vocab)
    size = tokens.shape[0]
    place = jnp.full(vocab, size, jnp.int32).at[tokens].set(jnp.arange(size, dtype=jnp.int32))
    return lambda logits: jnp.take(logits, place, axis=-1, mode="fill", fill_value=-jnp.inf)


def fit(logits: jax.Array, vocab: int) -> jax.Array:
    """Logits over the target's vocabulary: padding that only one model has can't be drafted."""
    logits = logits[..., :vocab]
    return jnp.pad(logits, (*((0, 0),) * (logits.ndim - 1), (0, vocab - logits.shape[-1])), constant_values=-jnp.inf)
