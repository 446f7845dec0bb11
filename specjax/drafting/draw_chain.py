"""Drawing a chain of K tokens from any function that gives next-token logits. All sampled chains share this file."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode import random, sampling
from specjax.decode.arrays import row_at, span
from specjax.decode.numeric import STRONGEST, check_number
from specjax.decode.types import DecodeState, Draft
from specjax.verify import pieces as chain

# One draft step. From the carry, the last token but one i32[B], the last token i32[B] and the last token's position
# i32[B] to the logits after the last token, f32[B, V'], and the new carry.
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
    ids: jax.Array | None = None,
    unroll: bool = False,
) -> tuple[Draft, Any]:
    """Draws K tokens one after another, each under the request's own sampling transforms, in one ``lax.scan``.

    The tokens are drawn among the D tokens that can be drafted, because a search of a whole vocabulary takes longer.
    The noise of all steps is made at once, before the first.

    Args:
      next_logits: one draft step.
      carry: the carry of the first step, such as a cache.
      state: the round's state.
      keys: key[B] to draw with.
      num_speculative_tokens: K, at least 1.
      vocab: V, the target's vocabulary size. Logits over fewer or more tokens are fitted to V.
      temperature: replaces the request's temperature. None: the request's.
      first: another function for the first step. The first step and the others are then two programs. None: all steps
        are ``next_logits``.
      ids: i32[V'], the token of each logit; other tokens can't be drafted. None: the ids are 0 to V' - 1.
      unroll: whether the steps are written out one after the other, in place of a loop on the device (static).

    Returns:
      The draft with its q, f32[B, K, V], and the last carry.
    """
    params, size = at_temperature(state.request.sampling, temperature), num_speculative_tokens
    spread = spreading(ids, vocab)
    step = _step_of(state, params, size, spread, ids)
    last = row_at(state.tokens, state.lengths - 1)
    previous = row_at(state.tokens, jnp.maximum(state.lengths - 2, 0))
    nothing = jnp.full((len(last), size), sampling.NO_TOKEN, jnp.int32)
    steps = jnp.arange(size, dtype=jnp.int32)
    noise = gumbel_noise(params, random.at(keys, state.lengths[:, None] + span(size)), vocab)  # [B, K, V], of all steps
    each = steps, (noise if ids is None else noise[..., ids]).swapaxes(0, 1)  # [K, B, D]
    passed: Any = (carry, previous, last, nothing)
    drawn = []  # of some steps: columns and tokens i32[.., B], scores f32[.., B, D], confidence and entropy f32[.., B]
    if first is not None:
        passed, one = step(first, passed, jax.tree.map(lambda x: x[0], each))
        drawn, each = [jax.tree.map(lambda x: x[None], one)], jax.tree.map(lambda x: x[1:], each)
    if len(each[0]):
        passed, rest = lax.scan(partial(step, next_logits), passed, each, unroll=unroll)
        drawn.append(rest)
    columns, tokens, scores, (confidence, entropy) = jax.tree.map(
        lambda *parts: jnp.concatenate(parts).swapaxes(0, 1), *drawn
    )
    q, valid = _distributions(columns, scores, params)
    return Draft(tokens, valid, spread(q, 0.0), confidence=confidence, entropy=entropy), passed[0]


def _step_of(
    state: DecodeState,
    params: sampling.SamplingParams,
    num_speculative_tokens: int,
    spread: Callable,
    ids: jax.Array | None,
) -> Callable:
    """The step that draws drafted token i32[] i, by noise f32[B, D], with a given function for the logits."""
    # Transforms that name no token see the draft's own tokens alone: a filter then searches D logits, not V.
    compact = ids is not None and not sampling.names_tokens(params)

    def step(next_logits: NextLogits, all_carry, number_and_noise):
        i, noise = number_and_noise
        carry, previous, last, drafted = all_carry  # drafted is i32[B, K], NO_TOKEN from token i on
        position = state.lengths - 1 + i  # of the last token
        logits, carry = next_logits(carry, previous, last, position)
        context = state.context(drafted[:, None])
        wide = spread(logits)[:, None]  # [B, 1, V]
        scores = sampling.ranked(logits[:, None] if compact else wide, params, context)[:, 0]
        scores = scores if compact or ids is None else scores[:, ids]  # [B, D]
        column = jnp.argmax(scores + noise, axis=-1).astype(jnp.int32)
        token = column if ids is None else ids[column]
        drafted = jnp.where(span(num_speculative_tokens) == i, token[:, None], drafted)
        # Confidence and entropy cost nothing unless some policy reads them: XLA leaves them out.
        sure = chain.certainty(sampling.unsharpened(wide, params, context)[:, 0], token)
        return (carry, last, token, drafted), (column, token, scores, sure)

    return step


def _distributions(
    columns: jax.Array, scores: jax.Array, params: sampling.SamplingParams
) -> tuple[jax.Array, jax.Array]:
    """q f32[B, K, D] of all tokens, drawn as columns i32[B, K] of scores f32[B, K, D], and bool[B, K] where q exists.

    All are normalised here at once. The steps need no sums over D.
    """
    q = sampling.normalised(scores)
    certain = jax.nn.one_hot(columns, scores.shape[-1], dtype=jnp.float32)
    return jnp.where(is_greedy(params), certain, q), jnp.isfinite(q[..., 0])


def noisy(scores: jax.Array, params: sampling.SamplingParams, keys: jax.Array) -> jax.Array:
    """Scores of :func:`sampling.ranked`, f32[B, T, V], plus the Gumbel noise of key[B, T]. The argmax is a draw.

    At temperature 0 no noise is added: the argmax is the best token, the lowest-numbered one of several.
    """
    return scores + gumbel_noise(params, keys, scores.shape[-1])


def gumbel_noise(params: sampling.SamplingParams, keys: jax.Array, vocab: int) -> jax.Array:
    """The noise f32[B, T, V] by which tokens are drawn with key[B, T]: zeros at temperature 0."""
    return jnp.where(is_greedy(params), 0.0, random.gumbel(keys, vocab))


def is_greedy(params: sampling.SamplingParams) -> jax.Array:
    """Whether each row's temperature is 0. -> bool[B, 1, 1]."""
    return (params.temperature == 0)[:, None, None]


def at_temperature(params: sampling.SamplingParams, temperature: float | None) -> sampling.SamplingParams:
    """The request's parameters, with another temperature unless ``temperature`` is None."""
    if temperature is None:
        return params
    return params._replace(temperature=jnp.full_like(params.temperature, temperature))


def check_temperature(temperature: Any) -> None:
    """Checks a draft's temperature.

    Raises:
      ValueError: ``temperature`` is neither None nor a finite number from 0 to ``STRONGEST``.
    """
    if temperature is not None:
        check_number("draft temperature", temperature, 0, STRONGEST)


def spreading(tokens: jax.Array | None, vocab: int) -> Callable[..., jax.Array]:
    """A function from logits over D tokens, f32[..., D], to logits over the whole vocabulary, f32[..., V].

    All other tokens get -inf, so they can't be drawn, or the function's second argument: 0, if the function is given
    probabilities. Call ``spreading`` once a round: it scatters once, and a scatter is a slow kernel. The function that
    ``spreading`` returns then only gathers in every step.

    Args:
      tokens: i32[D], the target's id of each of the D tokens. None: the ids are 0 to D - 1.
      vocab: V.
    """
    if tokens is None:
        return lambda logits, fill=-jnp.inf: fit(logits, vocab, fill)
    nowhere = jnp.iinfo(jnp.int32).max
    place = jnp.full(vocab, nowhere, jnp.int32).at[tokens].set(jnp.arange(len(tokens), dtype=jnp.int32))
    return lambda logits, fill=-jnp.inf: jnp.take(logits, place, axis=-1, mode="fill", fill_value=fill)


def fit(logits: jax.Array, vocab: int, fill: float = -jnp.inf) -> jax.Array:
    """Fits logits [..., V'] to the target's vocabulary, [..., V]. Ids that only one model has can't be drafted.

    ``fill`` stands for the logits of ids that the target alone has.
    """
    logits = logits[..., :vocab]
    return jnp.pad(logits, (*((0, 0),) * (logits.ndim - 1), (0, vocab - logits.shape[-1])), constant_values=fill)
