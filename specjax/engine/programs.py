"""The engine's compiled programs. Every program has one fixed shape, whatever the requests are.

B is the number of slots. The engine's state is a ``DecodeState`` of B rows with paged caches. A request's prompt is
read in a state of one row of its own, the *staged* row, which borrows the pools for each chunk. So a round never
touches a row whose prompt is still being read.

All programs run in the order of their dispatch, because each takes the state that the one before gave.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.decode import prefill, random, rows
from specjax.decode import round as rounds
from specjax.decode.decoder import Decoder
from specjax.decode.likeliest import Top, likeliest
from specjax.decode.sampling import NO_TOKEN, SamplingParams
from specjax.decode.types import DecodeState, Request
from specjax.models import cache as kv
from specjax.models.cache import KVCache
from specjax.models.model import Model


class Row(NamedTuple):
    """What a slot needs of a request: arrays of one row, NumPy's until they reach a program."""

    # u32[1, 2] The two words of the row's key.
    key: Any
    # The sampling parameters, with every field set.
    sampling: SamplingParams
    # i32[1, E] Tokens that end the row, padded with NO_TOKEN.
    stop_ids: Any
    # i32[1] The length at which the row ends, prompt included.
    limit: Any
    # i32[1] The number of prompt tokens.
    prompt_lengths: Any
    # i32[1, L] The prompt, padded with zeros.
    tokens: Any
    # i32[1, W] The row's pages, padded with the null page.
    table: Any


class Packed(NamedTuple):
    """The results of one round, in few arrays, so that they reach the host fast."""

    # i32[B, K+6] The numbers of committed, accepted and drafted tokens, whether the row runs on, whether the row has
    # failed, and the K + 1 tokens.
    numbers: jax.Array
    # f32[B, K+1] The log-probability of each new token. None: nobody asked.
    logprobs: jax.Array | None
    # [B, K+1, n] The likeliest tokens at each position. None: nobody asked.
    top: Top | None


class Limits(NamedTuple):
    """The sizes of the engine's arrays; static."""

    # B, the number of slots.
    slots: int
    # L, the tokens that each row has room for.
    tokens: int
    # The pages of every pool, the null page included.
    pages: int
    # E, the stop tokens that each row has room for.
    stops: int
    # The biased tokens, and the allowed tokens, that each row has room for.
    lists: int


@partial(jax.jit, static_argnames=("limits",))
def empty(decoder: Decoder, limits: Limits) -> DecodeState:
    """The engine's state without any request: no row is active, and every table holds null pages alone."""
    return _before_prefill(decoder, idle(decoder.target.vocab_size, limits), limits.pages)


def idle(vocab: int, limits: Limits) -> Row:
    """The rows of slots without a request. Every request's row has the same tree."""
    slots = limits.slots
    zeros = jnp.zeros(slots, jnp.int32)
    return Row(
        key=jnp.zeros((slots, 2), jnp.uint32),
        sampling=SamplingParams(jnp.zeros(slots)).full(vocab, limits.lists, limits.lists, limits.stops),
        stop_ids=jnp.full((slots, limits.stops), NO_TOKEN, jnp.int32),
        limit=zeros,
        prompt_lengths=zeros + 1,
        tokens=jnp.zeros((slots, limits.tokens), jnp.int32),
        table=zeros[:, None],
    )


@jax.jit
def stage(decoder: Decoder, row: Row) -> DecodeState:
    """The staged row of a request, before its prompt is read."""
    state = rows.without_pools(_before_prefill(decoder, row, pages=1))
    return rows.with_table(state, jnp.asarray(row.table))


def _before_prefill(decoder: Decoder, row: Row, pages: int) -> DecodeState:
    """The state of some rows before their prompts are read, with empty pools of ``pages`` pages."""
    key = random.wrapped(jnp.asarray(row.key))
    request = Request(key, row.sampling, row.stop_ids, row.limit, row.prompt_lengths)
    state = prefill.empty(decoder, jax.tree.map(jnp.asarray, request), jnp.asarray(row.tokens))

    return rows.over_caches(lambda cache: kv.paged(cache, len(row.limit), pages), lambda x: x, state)


@partial(jax.jit, static_argnames=("chunk", "width"), donate_argnames=("state", "row"))
def feed(
    decoder: Decoder, state: DecodeState, row: DecodeState, start: jax.Array, chunk: int, width: int
) -> tuple[DecodeState, DecodeState]:
    """Reads ``chunk`` more tokens of the staged row's prompt, from position i32[1] ``start`` on.

    Attention to a block of a prompt takes as long as the table is wide, so the table is cut to its first ``width``
    pages, which must hold the block.
    """
    narrow = rows.with_pools(rows.narrowed(row, width), state)
    read = prefill.feed(decoder, narrow, start, chunk)
    return rows.with_pools(state, read), rows.with_tables(rows.without_pools(read), row)


@partial(jax.jit, donate_argnames=("state",))
def join(state: DecodeState, row: DecodeState, slot: jax.Array) -> DecodeState:
    """Puts the staged row, whose prompt is read, into slot i32[1]. The next round generates the row's first tokens."""
    lengths = row.request.prompt_lengths
    row = row._replace(cache=kv.with_lengths(row.cache, lengths - 1), active=lengths < row.request.limit)
    return rows.insert(state, slot, row)


@partial(jax.jit, donate_argnames=("state",))
def release(state: DecodeState, slots: jax.Array) -> DecodeState:
    """Makes the slots marked by bool[B] idle. From the next program on, nothing is written to their pages."""
    return rows.release(state, slots)


@partial(jax.jit, static_argnames=("full",), donate_argnames=("state",))
def round(decoder: Decoder, state: DecodeState, full: bool) -> tuple[DecodeState, Packed]:
    """One round of all rows.

    Args:
      decoder: the target, drafter, verifier and K.
      state: the engine's state.
      full: whether a row uses other sampling parameters than the temperature, or wants log-probabilities. Parameters at
        their neutral values change no bit, so a row's tokens are the same with either value; static.
    """
    request = state.request
    if not full:
        simple = SamplingParams(request.sampling.temperature, vocabulary=request.sampling.vocabulary)
        state = state._replace(request=request._replace(sampling=simple))
    state, info = rounds.round(decoder, state)
    counts = info.committed, info.accepted, info.drafted, info.active, info.failed
    numbers = jnp.concatenate([jnp.stack([jnp.asarray(x, jnp.int32) for x in counts], axis=1), info.tokens], axis=1)
    packed = Packed(numbers, info.logprobs if full else None, info.top if full else None)
    return state._replace(request=request), packed


@partial(jax.jit, static_argnames=("room",))
def scoring_cache(lm: Model, room: int) -> KVCache:
    """A cache for one text of up to ``room`` tokens, outside of the engine's pages."""
    return lm.alloc_cache(1, room)


@partial(jax.jit, static_argnames=("count",), donate_argnames=("cache",))
def score(lm: Model, cache: KVCache, part: Any, start: Any, count: int) -> tuple[KVCache, jax.Array, Top]:
    """Reads all but the last token of i32[1, N + 1] ``part``, from position i32[1] ``start`` on.

    Returns:
      The cache, and for the last N tokens of ``part`` f32[N] log-probabilities and the ``count`` likeliest tokens.
    """
    out = lm(part[:, :-1], kv.with_lengths(cache, start))
    laws = jax.nn.log_softmax(out.logits[0].astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(laws, part[0, 1:, None], axis=1)[:, 0]
    return out.cache, chosen, likeliest(laws, count)


def caches(state: Any) -> list[KVCache]:
    """The caches of a state or of a drafter's own state."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, KVCache))
    return [leaf for leaf in leaves if isinstance(leaf, KVCache)]
