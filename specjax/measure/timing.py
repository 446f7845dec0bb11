"""Times the parts of a round one by one, on a job's own prompts and models."""

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
    """Proposes a fixed draft at no cost. The time of a round is then that of everything but the drafting."""

    # The draft that is proposed in every round.
    draft: Draft
    # The plan, which must fit the draft.
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
    """The median seconds of a plain step, of drafting K tokens, and of the rest of a round.

    Each part runs after the prompts, with a draft of real tokens. A program repeats the part ``count`` times on the
    device, so that the host's share is left out. The program runs ``repeats`` times, after one run that compiles.

    Args:
      job: from :func:`specjax.prepare`.
      count: the number of repetitions in one program.
      repeats: the number of timed runs of a program.

    Returns:
      "plain_step" and "draft" in seconds; and "verify", a dict from the width of the verified block in tokens ("1" to
      N + 1) to seconds.
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
    for width in decoder.widths:
        valid = jnp.broadcast_to(span(draft.valid.shape[1]) < width - 1, draft.valid.shape)
        given = Given(draft._replace(valid=valid), decoder.plan._replace(taps=()))
        verify[str(width)], state = timed_rounds(dataclasses.replace(decoder, drafter=given), state)
    return {"plain_step": plain_step, "draft": draft_seconds, "verify": verify}


def plain_step(job: Job, count: int = 4, repeats: int = 2) -> float:
    """The median seconds of a plain step after the prompts, as in :func:`calls`, which also times the other parts."""
    program = partial(_rounds, _plain(job.decoder), count=count)
    return _seconds(program, _endless(job)._replace(drafter=()), count, repeats)[0]


def _plain(decoder: Decoder) -> Decoder:
    """The decoder that decodes plainly with the same target."""
    return dataclasses.replace(decoder, drafter=NoDraft(), num_speculative_tokens=0)


def _endless(job: Job) -> DecodeState:
    """The state after the prompts. Each row has room for one whole block, and no stop token ends a row."""
    state = job.start()
    request = state.request._replace(
        limit=state.lengths + job.decoder.num_speculative_tokens + 1,
        stop_ids=jnp.full_like(state.request.stop_ids, NO_TOKEN),
    )
    return state._replace(request=request, active=jnp.ones_like(state.active))


def _seconds(program: Callable, carry: Any, count: int, repeats: int) -> tuple[float, Any]:
    """Times ``program``, which maps a carry to the next carry and repeats its work ``count`` times.

    -> the median seconds of one repetition, and the last carry.
    """
    carry = jax.block_until_ready(program(carry))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        carry = jax.block_until_ready(program(carry))
        times.append(time.perf_counter() - began)
    return statistics.median(times) / count, carry


@partial(jax.jit, static_argnames="count", donate_argnames="state")
def _rounds(decoder: Decoder, state: DecodeState, *, count: int) -> DecodeState:
    """The same round ``count`` times.

    The lengths are reset after each round. The written tokens and entries stay, so that each round depends on the round
    before.
    """

    def body(_, state: DecodeState) -> DecodeState:
        new, _ = rounds.round(decoder, state)
        return state._replace(tokens=new.tokens, cache=kv.with_lengths(new.cache, state.cache.lengths))

    return lax.fori_loop(0, count, body, state)


@partial(jax.jit, donate_argnames="state")
def _first(decoder: Decoder, state: DecodeState) -> tuple[DecodeState, Draft, Outcome]:
    """The state after drafting, the draft, and the outcome of a round that accepts nothing of the draft."""
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
    """Drafts ``count`` times. Before each draft the drafter rolls back the draft before."""

    def body(_, carry: tuple[DecodeState, Draft]) -> tuple[DecodeState, Draft]:
        state, draft = carry
        # The tokens past a row's length do not matter. The last draft is written there, so that the compiler can't move
        # the work out of the loop.
        rows = jnp.arange(state.lengths.shape[0], dtype=jnp.int32)
        state = state._replace(tokens=state.tokens.at[rows, state.lengths].set(draft.tokens[:, 0]))
        own = decoder.drafter.commit(decoder.target, state.drafter, state, outcome)
        lengths = state.cache.lengths
        draft, state = rounds.propose(decoder, state._replace(drafter=own))
        return state._replace(cache=kv.with_lengths(state.cache, lengths)), draft

    return lax.fori_loop(0, count, body, carry)
