"""What the parts of a round cost, each timed by itself on a job's own prompts and models."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode import round as rounds
from specjax.decode.arrays import span
from specjax.decode.decoder import Decoder
from specjax.decode.sampling import NO_TOKEN
from specjax.decode.types import DecodeState, Draft, Outcome, Plan, Verdict
from specjax.drafters import NoDraft
from specjax.drafting.base import Stateless
from specjax.generation.job import Job
from specjax.models import cache as kv
from specjax.models.cache import KVCache
from specjax.models.model import Model


@dataclasses.dataclass(frozen=True)
class Given(Stateless):
    """Proposes one fixed draft for nothing, so that a round of it is all but the drafting."""

    draft: Draft
    given_plan: Plan

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        del target, num_speculative_tokens
        return self.given_plan

    def propose(
        self, target: Model, own: tuple, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, tuple, KVCache]:
        del target, keys, num_speculative_tokens
        return self.draft, own, state.cache


jax.tree_util.register_dataclass(Given, data_fields=["draft"], meta_fields=["given_plan"])


def calls(job: Job, count: int = 4, repeats: int = 7) -> dict[str, Any]:
    """Median seconds of a plain step, of drafting K tokens, and of the rest of a round by the width of its block.

    Each is repeated on the device after the prompts, with its own draft of real tokens: ``count`` times in one
    program, so that the host's share is left out, and ``repeats`` such programs after one that compiles.

    Args:
      job: from :func:`specjax.prepare`.
      count: repetitions in one program.
      repeats: timed runs of the program.

    Returns:
      ``plain_step``, ``draft`` and ``verify``: a dict from block width ("1" to K + 1) to seconds.
    """
    decoder, state = job.decoder, _endless(job)
    drafter_state, state = state.drafter, state._replace(drafter=())

    def timed_rounds(decoder: Decoder, state: DecodeState) -> tuple[float, DecodeState]:
        return _seconds(partial(_rounds, decoder, count=count), state, count, repeats)

    plain_step, state = timed_rounds(_plain(decoder), state)
    if decoder.num_speculative_tokens == 0:
        return {"plain_step": plain_step, "draft": 0.0, "verify": {"1": plain_step}}
    state, draft, outcome = _first(decoder, state._replace(drafter=drafter_state))
    drafts = partial(_drafts, decoder, outcome=outcome, count=count)
    draft_seconds, (state, draft) = _seconds(drafts, (state, draft), count, repeats)
    state, verify = state._replace(drafter=()), {}
    for width in decoder.plan.widths:
        valid = jnp.broadcast_to(span(draft.valid.shape[1]) < width - 1, draft.valid.shape)
        given = Given(draft._replace(valid=valid), decoder.plan._replace(taps=()))
        verify[str(width)], state = timed_rounds(dataclasses.replace(decoder, drafter=given), state)
    return {"plain_step": plain_step, "draft": draft_seconds, "verify": verify}


def plain_step(job: Job, count: int = 4, repeats: int = 2) -> float:
    """Median seconds of a plain step after the prompts: the first of :func:`calls`, alone."""
    program = partial(_rounds, _plain(job.decoder), count=count)
    return _seconds(program, _endless(job)._replace(drafter=()), count, repeats)[0]


def _plain(decoder: Decoder) -> Decoder:
    return dataclasses.replace(decoder, drafter=NoDraft(), num_speculative_tokens=0)


def _endless(job: Job) -> DecodeState:
    """The state after the prompts, with room for one whole block a row and nothing that ends a row."""
    state = job.start()
    request = state.request._replace(
        limit=state.lengths + job.decoder.num_speculative_tokens + 1,
        stop_ids=jnp.full_like(state.request.stop_ids, NO_TOKEN),
    )
    return state._replace(request=request, active=jnp.ones_like(state.active))


def _seconds(program: Callable, carry: Any, count: int, repeats: int) -> tuple[float, Any]:
    """Median seconds of one of the ``count`` repetitions in program(carry) -> carry, and the last carry."""
    carry = jax.block_until_ready(program(carry))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        carry = jax.block_until_ready(program(carry))
        times.append(time.perf_counter() - began)
    return statistics.median(times) / count, carry


@partial(jax.jit, static_argnames="count", donate_argnames="state")
def _rounds(decoder: Decoder, state: DecodeState, *, count: int) -> DecodeState:
    """The same round again and again: what a round writes depends on the last one, and its lengths are reset."""

    def body(_, state: DecodeState) -> DecodeState:
        new, _ = rounds.round(decoder, state)
        return state._replace(tokens=new.tokens, cache=kv.with_lengths(new.cache, state.cache.lengths))

    return lax.fori_loop(0, count, body, state)


@partial(jax.jit, donate_argnames="state")
def _first(decoder: Decoder, state: DecodeState) -> tuple[DecodeState, Draft, Outcome]:
    """A draft, the state after it, and what the drafter is told if nothing of it is kept."""
    lengths = state.cache.lengths
    draft, state = rounds.propose(decoder, state)
    scored = rounds.score(decoder, state, draft)
    nothing = jnp.zeros_like(lengths)
    judged = rounds.judged_as(decoder, state, scored, Verdict(nothing, nothing, nothing))
    state = state._replace(cache=kv.with_lengths(judged.out.cache, lengths))
    drafted = jnp.sum(judged.draft.valid, axis=1, dtype=jnp.int32)
    return state, draft, rounds.outcome(scored, judged, nothing, drafted)


@partial(jax.jit, static_argnames="count", donate_argnames="carry")
def _drafts(
    decoder: Decoder, carry: tuple[DecodeState, Draft], *, outcome: Outcome, count: int
) -> tuple[DecodeState, Draft]:
    """Drafting, and the drafter's rollback of the draft, again and again."""

    def body(_, carry: tuple[DecodeState, Draft]) -> tuple[DecodeState, Draft]:
        state, draft = carry
        # Past its length a row holds nothing that matters; with the last draft there no repetition is loop-invariant.
        rows = jnp.arange(state.lengths.shape[0], dtype=jnp.int32)
        state = state._replace(tokens=state.tokens.at[rows, state.lengths].set(draft.tokens[:, 0]))
        own = decoder.drafter.commit(decoder.target, state.drafter, state, outcome)
        lengths = state.cache.lengths
        draft, state = rounds.propose(decoder, state._replace(drafter=own))
        return state._replace(cache=kv.with_lengths(state.cache, lengths)), draft

    return lax.fori_loop(0, count, body, carry)
