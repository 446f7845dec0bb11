"""Reads committed text into caches: prompts into the target's cache, and committed tokens into a draft's cache."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode import history as histories
from specjax.decode import random
from specjax.decode import rows as rows_of
from specjax.decode.arrays import span
from specjax.decode.numeric import is_int
from specjax.decode.types import DecodeState, History, Request
from specjax.models import cache as kv
from specjax.models import tuning
from specjax.models.cache import KVCache
from specjax.models.model import Model, Output

if TYPE_CHECKING:
    from specjax.decode.decoder import Decoder


def empty(decoder: "Decoder", request: Request, tokens: jax.Array, history: History | None = None) -> DecodeState:
    """The state before any prompt is read. The caches are allocated, and no row is active.

    Args:
      decoder: the target, drafter, verifier and K.
      request: the request of each row.
      tokens: i32[B, L], the prompts. Each prompt starts at the start of its row.
      history: an empty history, or None if nobody will read the history.

    Raises:
      ValueError: the request's keys are of another kind than ``random.IMPLEMENTATION``.
    """
    random.check_keys(request.key)
    batch, capacity = tokens.shape
    return DecodeState(
        request=request,
        tokens=tokens,
        lengths=request.prompt_lengths,
        active=jnp.zeros(batch, bool),
        failed=jnp.zeros(batch, bool),
        cache=decoder.target.alloc_cache(batch, capacity),
        drafter=decoder.drafter.init(decoder.target, batch, capacity, decoder.num_speculative_tokens),
        history=history,
    )


def feed(decoder: "Decoder", state: DecodeState, starts: jax.Array, chunk: int) -> DecodeState:
    """Reads ``chunk`` more tokens of each prompt.

    The last prompt token does not count as read: the first round feeds it. A chunk may reach past the end of a prompt.
    The cache entries from the last prompt token on are stale: the row's cache length leaves them out.

    Args:
      decoder: the target, drafter, verifier and K.
      state: the state so far.
      starts: i32[B], the position of the first token to read in each row. The caller guarantees starts + chunk <= L.
      chunk: the number of tokens to read.

    Returns:
      The state after these tokens.
    """
    tokens = jnp.take_along_axis(state.tokens, starts[:, None] + span(chunk), axis=1)
    cache = kv.with_lengths(state.cache, starts)
    ends = state.request.prompt_lengths - 1
    out = decoder.target.read(tokens, cache, ends, taps=decoder.plan.taps)
    own = decoder.drafter.follow(decoder.target, state.drafter, state, starts, out)
    read = jnp.minimum(starts + chunk, ends)
    return state._replace(cache=kv.with_lengths(out.cache, read), drafter=own)


def start(
    decoder: "Decoder",
    request: Request,
    tokens: jax.Array,
    chunk: int,
    keep_history: bool = True,
    logprobs: bool = False,
) -> DecodeState:
    """The state before the first round. Of each prompt all tokens but the last are read, ``chunk`` tokens at a time.

    Args:
      decoder: the target, drafter, verifier and K.
      request: the request of each row.
      tokens: i32[B, L], the prompts. Each prompt starts at the start of its row, and L is a multiple of ``chunk``.
      chunk: the number of tokens that one call of the target reads.
      keep_history: whether the state has a history.
      logprobs: whether the history has the log-probability of each token.

    Raises:
      ValueError: the request's keys are of another kind than ``random.IMPLEMENTATION``.
    """
    rows, capacity = tokens.shape
    kept = histories.empty(rows, capacity, logprobs, decoder.top_logprobs) if keep_history else None
    state = rows_of.over_mesh(empty(decoder, request, tokens, kept), decoder.target.mesh)
    wanted = jnp.max(request.prompt_lengths) - 1

    def body(i: jax.Array, state: DecodeState) -> DecodeState:
        return feed(decoder, state, jnp.full_like(request.prompt_lengths, i * chunk), chunk)

    state = lax.fori_loop(0, (wanted + chunk - 1) // chunk, body, state)
    cache = kv.with_lengths(state.cache, request.prompt_lengths - 1)
    return state._replace(cache=cache, active=request.prompt_lengths < request.limit)


def read_along(
    lm: Model, cache: KVCache, state: DecodeState, starts: jax.Array, size: int, taps: tuple[int, ...] = ()
) -> Output:
    """Feeds a draft model the block of each prompt that the target has just read.

    Args:
      lm: the draft model.
      cache: the draft model's cache.
      state: holds the prompts.
      starts: i32[B], the position of the block's first token in each row.
      size: the number of tokens of the block. What comes past a row's last prompt token but one is padding.
      taps: the numbers of layers after which the hidden states are returned too.

    Returns:
      The draft model's answers, without logits. The cache's lengths leave padding out, and never fall.
    """
    tokens = jnp.take_along_axis(state.tokens, starts[:, None] + span(size), axis=1)
    ends = state.request.prompt_lengths - 1
    out = lm.read(tokens, kv.with_lengths(cache, starts), ends, taps)
    read = jnp.minimum(starts + size, ends)
    return out._replace(cache=kv.with_lengths(out.cache, jnp.maximum(read, cache.lengths)))


def catch_up(lm: Model, cache: KVCache, state: DecodeState, wanted: jax.Array, chunk: int | None) -> KVCache:
    """Feeds committed tokens to a draft model until its cache holds enough of them.

    The loop runs while any active row is behind. A row that is not behind is fed too, and computes some of its entries
    again. An encoder has read the sources before: :func:`read_sources`.

    Args:
      lm: the draft model.
      cache: the draft model's cache.
      state: holds the committed tokens.
      wanted: i32[B], the number of tokens that the cache of each active row shall hold.
      chunk: the number of tokens that one call reads; None: the default of :func:`tuning.prefill_chunk`.

    Returns:
      The cache, with lengths of at least ``wanted`` in every active row.
    """
    size = min(tuning.prefill_chunk(chunk), cache.capacity)
    if lm.has_encoder:
        size = min(size, _SAFE)

    def behind(cache: KVCache):
        return jnp.any(state.active & (cache.lengths < wanted))

    def read(cache: KVCache) -> KVCache:
        starts = jnp.minimum(cache.lengths, cache.last_start(size))  # near the end some entries are computed again
        tokens = jnp.take_along_axis(state.tokens, starts[:, None] + span(size), axis=1, mode="clip")
        out = lm(tokens, kv.with_lengths(cache, starts), with_logits=False)
        reached = jnp.minimum(starts + size, wanted)
        return kv.with_lengths(out.cache, jnp.maximum(reached, cache.lengths))

    return lax.while_loop(behind, read, cache)


# The most tokens that one call feeds to a decoder with an encoder. The capacity leaves room for two tokens past the
# limit, at least. A longer block may have to start earlier, and would then write over the source.
_SAFE = 3


def read_sources(lm: Model, cache: KVCache, state: DecodeState) -> KVCache:
    """The cache of a draft model that may not have read along, once its encoder, if any, has read every source.

    If one row's source is not read, the sources of all rows are read, and their texts once more after that.
    """
    if not lm.has_encoder:
        return cache
    ends = state.request.prompt_lengths - 1

    def encode(cache: KVCache) -> KVCache:
        return kv.with_lengths(lm.read(state.tokens, kv.with_lengths(cache, ends * 0), ends).cache, ends)

    unread = jnp.any(state.active & (cache.source != ends))
    return lax.cond(unread, encode, lambda cache: cache, cache)


def check_chunk(prefill_chunk: Any) -> None:
    """Raises ValueError unless ``prefill_chunk`` is None or an integer of at least 1."""
    if prefill_chunk is not None and not (is_int(prefill_chunk) and prefill_chunk >= 1):
        raise ValueError(f"prefill_chunk must be an integer of at least 1, or None, got {prefill_chunk!r}")
