"""The history of a run, kept on the device: how :class:`specjax.decode.types.History` begins and grows."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode.arrays import row_at, token_probs
from specjax.decode.likeliest import Top, likeliest
from specjax.decode.types import DecodeState, History, RoundInfo


def empty(batch: int, capacity: int, logprobs: bool, top_logprobs: int) -> History:
    """A history of nothing for ``capacity`` tokens a row; ``top_logprobs`` is n, the likeliest tokens kept for each."""

    def zeros(dtype, *last: int) -> jax.Array:
        return jnp.zeros((batch, capacity, *last), dtype)

    top = Top(zeros(jnp.int32, top_logprobs), zeros(jnp.float32, top_logprobs)) if top_logprobs else None
    rounds = jnp.zeros(batch, jnp.int32)
    return History(rounds, zeros(jnp.int32), zeros(jnp.int32), zeros(jnp.float32) if logprobs else None, top)


def history_of(state: DecodeState) -> History:
    """The history of a state that has one."""
    assert state.history is not None, "the state was started with keep_history=False"
    return state.history


def extended(history: History, info: RoundInfo, running: jax.Array) -> History:
    """The history with one more round in the rows of bool[B] ``running``."""
    return counted(history, info.drafted, info.accepted, running)._replace(
        logprobs=None if history.logprobs is None else put(history.logprobs, info.logprobs, info.starts),
        top=None if history.top is None else jax.tree.map(lambda a, b: put(a, b, info.starts), history.top, info.top),
    )


def counted(history: History, drafted: jax.Array, accepted: jax.Array, running: jax.Array) -> History:
    """The history with the counts i32[B] of one more round in the rows of bool[B] ``running``."""

    def noted(counts: jax.Array, new: jax.Array) -> jax.Array:
        new = jnp.where(running, new, row_at(counts, history.rounds))  # idle rows write what is there
        return put(counts, new[:, None], history.rounds)

    return history._replace(
        rounds=history.rounds + running.astype(jnp.int32),
        drafted=noted(history.drafted, drafted),
        accepted=noted(history.accepted, accepted),
    )


def put(buffer: jax.Array, block: jax.Array, starts: jax.Array) -> jax.Array:
    """Writes block[B, T, ...] into buffer[B, L, ...] at each row's own start i32[B].

    The capacity leaves room for a whole block past every limit, so no slice is clamped. What lies past a row's new
    length is overwritten by the next round. A single row is written as one slice, because a scatter takes further
    kernels on a GPU, which check its bounds.
    """
    if len(starts) == 1:
        return lax.dynamic_update_slice(buffer, block, (0, starts[0], *(0,) * (buffer.ndim - 2)))
    return jax.vmap(partial(lax.dynamic_update_slice_in_dim, axis=0))(buffer, block, starts)


def log_probabilities(logits: jax.Array, tokens: jax.Array, count: int) -> tuple[jax.Array, Top | None]:
    """Log-probabilities of tokens i32[B, T] under logits f32[B, T, V], and the ``count`` likeliest tokens, if any."""
    every = jax.nn.log_softmax(logits)
    return token_probs(every, tokens), likeliest(every, count) if count else None
