"""The engine's compiled programs. Every program has one fixed shape, whatever the requests are.

B is the number of slots. The engine's state is a ``DecodeState`` of B rows with paged caches. A request's prompt is
read in a state of one row of its own, the *staged* row, which borrows the pools for each chunk. So a round never
touches a row whose prompt is still being read.

All programs run in the order of their dispatch, because each takes the state that the one before gave.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.decode import prefill, random, rows
from specjax.decode import round as rounds
from specjax.decode.decoder import Decoder
from specjax.decode.likeliest import Top, likeliest
from specjax.decode.sampling import NO_TOKEN, SamplingParams
from specjax.decode.types import DecodeState, Request
from specjax.engine.layout import Layout, layout_of
from specjax.models import axes
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


class Programs(NamedTuple):
    """The functions of this file that run on the device, each compiled at its first call."""

    empty: Callable
    stage: Callable
    feed: Callable
    join: Callable
    release: Callable
    take_row: Callable
    give_tables: Callable
    read_pages: Callable
    write_pages: Callable
    resumed: Callable
    round: Callable
    scoring_cache: Callable
    score: Callable


def programs_of(decoder: Decoder, limits: Limits) -> Programs:
    """The programs of an engine. Engines whose states lie alike share them."""
    return _compiled(layout_of(jax.eval_shape(functools.partial(empty, limits=limits), decoder), decoder.target))


@functools.cache
def _compiled(layout: Layout) -> Programs:
    """The programs for states of one layout."""
    state, whole = layout.state, layout.whole
    return Programs(
        empty=jax.jit(empty, static_argnames="limits", out_shardings=state),
        stage=jax.jit(stage, out_shardings=whole),
        feed=jax.jit(
            feed,
            static_argnames=("chunk", "width"),
            donate_argnames=("state", "row"),
            out_shardings=(state, whole),
        ),
        join=jax.jit(join, donate_argnames="state", out_shardings=state),
        release=jax.jit(release, donate_argnames="state", out_shardings=state),
        take_row=jax.jit(take_row, out_shardings=whole),
        give_tables=jax.jit(give_tables, donate_argnames="state", out_shardings=state),
        read_pages=jax.jit(read_pages, out_shardings=whole),
        write_pages=jax.jit(write_pages, donate_argnames="state", out_shardings=state),
        resumed=jax.jit(resumed, out_shardings=whole),
        round=jax.jit(round, static_argnames="full", donate_argnames="state", out_shardings=(state, whole)),
        scoring_cache=jax.jit(scoring_cache, static_argnames="room"),
        score=jax.jit(score, static_argnames="count", donate_argnames="cache"),
    )


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


def feed(
    decoder: Decoder, state: DecodeState, row: DecodeState, start: jax.Array, part: jax.Array, chunk: int, width: int
) -> tuple[DecodeState, DecodeState]:
    """Reads ``chunk`` more tokens of the staged row's prompt, from position i32[1] ``start`` on.

    The row's pages belong to ``part`` i32[1] of the mesh. Other parts have nothing else to do meanwhile. They read a
    copy of the row that owns no pages.

    Attention to a block of a prompt takes as long as the table is wide, so the table is cut to its first ``width``
    pages, which must hold the block.
    """
    narrow = rows.with_pools(rows.narrowed(row, width), state)
    count = axes.parts(decoder.target.mesh)
    if count > 1:
        copies = rows.take(narrow, jnp.zeros(count, jnp.int32))
        narrow = rows.over_mesh(rows.release(copies, jnp.arange(count) != part), decoder.target.mesh)
    read = prefill.feed(decoder, narrow, jnp.repeat(start, count), chunk)
    read = rows.take(read, part) if count > 1 else read
    return rows.with_pools(state, read), rows.with_tables(rows.without_pools(read), row)


def join(state: DecodeState, row: DecodeState, slot: jax.Array) -> DecodeState:
    """Puts the staged row, all of whose tokens but the last are read, into slot i32[1]. The next round goes on there.

    A row may have read its prompt alone, or it may have some new tokens already: in both cases its last token is not
    read yet.
    """
    cache = kv.with_lengths(row.cache, row.lengths - 1)
    return rows.insert(state, slot, row._replace(cache=cache, active=row.lengths < row.request.limit))


def release(state: DecodeState, slots: jax.Array) -> DecodeState:
    """Makes the slots marked by bool[B] idle. From the next program on, nothing is written to their pages."""
    return rows.release(state, slots)


def take_row(state: DecodeState, slot: jax.Array) -> DecodeState:
    """The row in slot i32[1], without pools."""
    return rows.without_pools(rows.take(state, slot))


def give_tables(state: DecodeState, tables: jax.Array) -> DecodeState:
    """Gives the slots the pages i32[B, W]: requests that have grown have more of them."""
    return rows.with_table(state, tables)


def read_pages(state: DecodeState, pages: jax.Array) -> list[Any]:
    """The entries of pages i32[n] in every pool: arrays [n, kv_heads, PAGE, ...]."""
    return [jax.tree.map(lambda pool: pool[pages], (cache.keys, cache.values)) for cache in caches(state)]


def write_pages(state: DecodeState, pages: jax.Array, entries: list[Any]) -> DecodeState:
    """Puts entries, as :func:`read_pages` gave them, into pages i32[n] of every pool."""
    left = iter(entries)

    def filled(cache: KVCache) -> KVCache:
        pools = cache.keys, cache.values
        keys, values = jax.tree.map(lambda pool, new: pool.at[pages].set(new), pools, next(left))
        return cache.replace(keys=keys, values=values)

    return rows.over_caches(filled, lambda x: x, state)


def resumed(row: DecodeState, key: jax.Array, table: jax.Array) -> DecodeState:
    """A saved row with another key's words u32[1, 2] and other pages i32[1, W]: the staged row of a request."""
    request = row.request._replace(key=random.wrapped(key))
    return rows.with_table(row._replace(request=request), table)


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


def scoring_cache(lm: Model, room: int) -> KVCache:
    """A cache for one text of up to ``room`` tokens, outside of the engine's pages."""
    return lm.alloc_cache(1, room)


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
