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
) -> tuple[Draft, Any]:
    """Draws K tokens one after another, each under the request's own sampling transforms, in one ``lax.scan``.

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

    Returns:
      The draft with its q, f32[B, K, V], and the last carry.
    """
    params = at_temperature(state.request.sampling, temperature)
    step = _step_of(state, keys, params, num_speculative_tokens, vocab, ids)
    last = row_at(state.tokens, state.lengths - 1)
    previous = row_at(state.tokens, jnp.maximum(state.lengths - 2, 0))
    nothing = jnp.full((len(last), num_speculative_tokens), sampling.NO_TOKEN, jnp.int32)
    steps = jnp.arange(num_speculative_tokens, dtype=jnp.int32)
    passed: Any = (carry, previous, last, nothing)
    drawn = []  # tokens i32[steps, B], scores f32[steps, B, V], confidence and entropy f32[steps, B]
    if first is not None:
        passed, one = step(first, passed, steps[0])
        drawn, steps = [jax.tree.map(lambda x: x[None], one)], steps[1:]
    if len(steps):
        passed, rest = lax.scan(partial(step, next_logits), passed, steps)
        drawn.append(rest)
    tokens, scores, sure = jax.tree.map(lambda *parts: jnp.concatenate(parts).swapaxes(0, 1), *drawn)
    return _draft_of(tokens, scores, sure, params), passed[0]


def _step_of(
    state: DecodeState,
    keys: jax.Array,
    params: sampling.SamplingParams,
    num_speculative_tokens: int,
    vocab: int,
    ids: jax.Array | None,
) -> Callable:
    """The step that draws drafted token i32[] i with a given function for the logits."""
    spread = spreading(ids, vocab)
    # Transforms that name no token see the draft's own tokens alone: a filter then searches D logits, not V.
    compact = ids is not None and not sampling.names_tokens(params)

    def step(next_logits: NextLogits, all_carry, i):
        carry, previous, last, drafted = all_carry  # drafted is i32[B, K], NO_TOKEN from token i on
        position = state.lengths - 1 + i  # of the last token
        logits, carry = next_logits(carry, previous, last, position)
        context = state.context(drafted[:, None])
        wide = spread(logits)[:, None]  # [B, 1, V]
        scores = sampling.ranked(logits[:, None] if compact else wide, params, context)
        scores = spread(scores) if compact else scores  # [B, 1, V]
        step_keys = random.at(keys, position[:, None] + 1)
        token = jnp.argmax(noisy(scores, params, step_keys), axis=-1).astype(jnp.int32)[:, 0]
        drafted = jnp.where(span(num_speculative_tokens) == i, token[:, None], drafted)
        # Confidence and entropy cost nothing unless some policy reads them: XLA leaves them out.
        sure = chain.certainty(sampling.unsharpened(wide, params, context)[:, 0], token)
        return (carry, last, token, drafted), (token, scores[:, 0], sure)

    return step


def _draft_of(tokens: jax.Array, scores: jax.Array, sure: tuple, params: sampling.SamplingParams) -> Draft:
    """The draft of drawn tokens i32[B, K], scores f32[B, K, V], and ``sure``: confidence and entropy, each f32[B, K].

    The distributions q are normalised here for all tokens at once. The steps need no sums over V.
    """
    confidence, entropy = sure
    q = sampling.normalised(scores)
    valid = jnp.isfinite(q[..., 0])
    q = jnp.where(is_greedy(params), jax.nn.one_hot(tokens, scores.shape[-1], dtype=jnp.float32), q)
    return Draft(tokens, valid, q, confidence=confidence, entropy=entropy)


def noisy(scores: jax.Array, params: sampling.SamplingParams, keys: jax.Array) -> jax.Array:
    """Scores of :func:`sampling.ranked`, f32[B, T, V], plus the Gumbel noise of key[B, T]. The argmax is a draw.

    At temperature 0 no noise is added: the argmax is the best token, the lowest-numbered one of several.
    """
    return scores + jnp.where(is_greedy(params), 0.0, random.gumbel(keys, scores.shape[-1]))


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


def spreading(tokens: jax.Array | None, vocab: int) -> Callable[[jax.Array], jax.Array]:
    """A function from logits over D tokens, f32[..., D], to logits over the whole vocabulary, f32[..., V].

    Other tokens get -inf and can't be drawn. Call ``spreading`` once a round: it scatters once, and a scatter is a slow
    kernel. The function that it returns then only gathers in every step.

    Args:
      tokens: i32[D], the target's id of each of the D tokens. None: the ids are 0 to D - 1.
      vocab: V.
    """
    if tokens is None:
        return lambda logits: fit(logits, vocab)
    size = tokens.shape[0]
    place = jnp.full(vocab, size, jnp.int32).at[tokens].set(jnp.arange(size, dtype=jnp.int32))
    return lambda logits: jnp.take(logits, place, axis=-1, mode="fill", fill_value=-jnp.inf)


def fit(logits: jax.Array, vocab: int) -> jax.Array:
    """Fits logits [..., V'] to the target's vocabulary, [..., V]. Ids that only one model has can't be drafted."""
    logits = logits[..., :vocab]
    return jnp.pad(logits, (*((0, 0),) * (logits.ndim - 1), (0, vocab - logits.shape[-1])), constant_values=-jnp.inf)
