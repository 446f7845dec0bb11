"""What the parts of a round cost, each timed by itself on a request's own prompts and models."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax import decode, tree
from specjax.drafters import NoDraft
from specjax.drafters.base import Stateless
from specjax.generation import Job, prepare
from specjax.models import cache as kv
from specjax.models.lm import LM
from specjax.requests import Options
from specjax.sampling import NO_TOKEN
from specjax.types import DecodeState, Draft, Drafter, Outcome, Verdict, Verifier


@dataclasses.dataclass(frozen=True)
class Given(Stateless):
    """Proposes one fixed draft for nothing, so that a round of it is all but the drafting."""

    draft: Draft
    block_widths: tuple[int, ...]

    def widths(self, num_speculative_tokens: int) -> tuple[int, ...]:
        return self.block_widths

    def propose(self, target: LM, state: DecodeState, keys: jax.Array, num_speculative_tokens: int):
        return self.draft, state


jax.tree_util.register_dataclass(Given, data_fields=["draft"], meta_fields=["block_widths"])


def calls(lm: LM, prompts: str | Sequence, count: int = 4, repeats: int = 7, **options) -> dict[str, Any]:
    """Median seconds of a plain step, of drafting K tokens, and of the rest of a round by the width of its block.

    Each is repeated on the device after the prompts, with its own draft of real tokens: ``count`` times in one
    program, so that the host's share is left out, and ``repeats`` such programs after one that compiles.

    Args:
      lm, prompts, **options: as of ``specjax.generate``.

    Returns:
      ``plain_step``, ``draft`` and ``verify``: a dict from block width ("1" to K + 1) to seconds.

    Raises:
      ValueError: as ``generate``.
    """
    job = prepare(lm, prompts, Options(**options))
    size, state = job.num_speculative_tokens, _endless(job)
    drafter_state, state = state.drafter, state._replace(drafter=())

    def rounds(drafter: Drafter, size: int, state: DecodeState) -> tuple[float, DecodeState]:
        program = partial(_rounds, lm, drafter, verifier=job.verifier, size=size, count=count)
        return _seconds(program, state, count, repeats)

    plain_step, state = rounds(NoDraft(), 0, state)
    if size == 0:
        return {"plain_step": plain_step, "draft": 0.0, "verify": {"1": plain_step}}
    state, draft, outcome = _first(lm, job.drafter, job.verifier, size, state._replace(drafter=drafter_state))
    drafts = partial(_drafts, lm, job.drafter, outcome=outcome, verifier=job.verifier, size=size, count=count)
    draft_seconds, (state, draft) = _seconds(drafts, (state, draft), count, repeats)
    state, verify = state._replace(drafter=()), {}
    for width in job.drafter.widths(size):
        valid = jnp.broadcast_to(jnp.arange(draft.valid.shape[1]) < width - 1, draft.valid.shape)
        given = Given(draft._replace(valid=valid), job.drafter.widths(size))
        verify[str(width)], state = rounds(given, size, state)
    return {"plain_step": plain_step, "draft": draft_seconds, "verify": verify}


def plain_step(lm: LM, prompts: str | Sequence, count: int = 4, repeats: int = 2, **options) -> float:
    """Median seconds of a plain step after the prompts: the first of :func:`calls`, alone.

    Raises:
      ValueError: as ``generate``.
    """
    job = prepare(lm, prompts, Options(**options))
    program = partial(_rounds, lm, NoDraft(), verifier=job.verifier, size=0, count=count)
    return _seconds(program, _endless(job)._replace(drafter=()), count, repeats)[0]


def _endless(job: Job) -> DecodeState:
    """The state after the prompts, with room for one whole block a row and nothing that stops it."""
    state = job.start(job.request)
    return state._replace(
        limit=state.lengths + job.num_speculative_tokens + 1,
        stop_ids=jnp.full_like(state.stop_ids, NO_TOKEN),
        active=jnp.ones_like(state.active),
    )


def _seconds(program: Callable, carry: Any, count: int, repeats: int) -> tuple[float, Any]:
    """Median seconds of one of the ``count`` repetitions in program(carry) -> carry, and the last carry."""
    carry = jax.block_until_ready(program(carry))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        carry = jax.block_until_ready(program(carry))
        times.append(time.perf_counter() - began)
    return statistics.median(times) / count, carry


@partial(jax.jit, static_argnames=("verifier", "size", "count"), donate_argnames="state")
def _rounds(
    target: LM, drafter: Drafter, state: DecodeState, *, verifier: Verifier, size: int, count: int
) -> DecodeState:
    """The same round again and again: what it writes depends on what the last one wrote, its lengths are reset."""

    def body(_, state: DecodeState) -> DecodeState:
        new, _ = decode.round(target, drafter, verifier, size, state)
        return state._replace(tokens=new.tokens, cache=kv.with_lengths(new.cache, state.cache.lengths))

    return lax.fori_loop(0, count, body, state)


@partial(jax.jit, static_argnames=("verifier", "size"), donate_argnames="state")
def _first(
    target: LM, drafter: Drafter, verifier: Verifier, size: int, state: DecodeState
) -> tuple[DecodeState, Draft, Outcome]:
    """A draft, the state after it, and what the drafter is told if nothing of it is kept."""
    lengths = state.cache.lengths
    draft, state = drafter.propose(target, state, verifier.draft_keys(state.key, state.lengths), size)
    shape, nothing = tree.of(draft), jnp.zeros_like(lengths)
    out = decode.score(target, state, draft, shape, drafter.widths(size), drafter.taps(target))
    refused, p = Verdict(nothing, nothing, nothing), jax.nn.softmax(out.logits)
    answers = jnp.argmax(out.logits, axis=-1).astype(jnp.int32)
    line, p, out = decode.along(shape, refused, draft, p, out, state, size)
    state = state._replace(cache=kv.with_lengths(out.cache, lengths))
    drafted = jnp.sum(line.valid, axis=1, dtype=jnp.int32)
    return state, draft, Outcome(nothing, drafted, p, out.logits, out.hidden, out.taps, draft, answers)


@partial(jax.jit, static_argnames=("verifier", "size", "count"), donate_argnames="carry")
def _drafts(
    target: LM,
    drafter: Drafter,
    carry: tuple[DecodeState, Draft],
    *,
    outcome: Outcome,
    verifier: Verifier,
    size: int,
    count: int,
) -> tuple[DecodeState, Draft]:
    """Drafting, and the drafter's rollback of it, again and again."""

    def body(_, carry: tuple[DecodeState, Draft]) -> tuple[DecodeState, Draft]:
        state, draft = carry
        # Past its length a row holds nothing that matters; with the last draft there no repetition is loop-invariant.
        rows = jnp.arange(state.lengths.shape[0])
        state = state._replace(tokens=state.tokens.at[rows, state.lengths].set(draft.tokens[:, 0]))
        state = drafter.commit(target, state, outcome)
        lengths = state.cache.lengths
        draft, state = drafter.propose(target, state, verifier.draft_keys(state.key, state.lengths), size)
        return state._replace(cache=kv.with_lengths(state.cache, lengths)), draft

    return lax.fori_loop(0, count, body, carry)
