"""Rounds in the middle of a text, without the first one's share of prefill and the last one's cut."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import decode
from specjax.benchmark import measure
from specjax.generation import DRAFTERS, Job, prepare
from specjax.models import cache as kv
from specjax.models.lm import LM
from specjax.requests import Options
from specjax.types import DecodeState, Drafter, Verifier


class Steady(NamedTuple):
    """So many rounds of a job, timed together."""

    job: Job
    rounds: int

    @classmethod
    def of(cls, lm: LM, prompts: list[list[int]], drafter: Drafter | None, size: int, rounds: int, capacity: int):
        """Greedy, with room for ``rounds`` + 1 blocks of ``size`` + 1 tokens, so that none is cut."""
        new = (rounds + 1) * (size + 1)
        options = Options(drafter, num_speculative_tokens=size, max_new_tokens=new, ignore_eos=True, capacity=capacity)
        return cls(prepare(lm, prompts, options), rounds)

    def compile_prefill(self) -> None:
        """Shared by jobs of one batch and capacity, whatever they draft."""
        given, fixed = _prefill_of(self.job)
        decode.start_jit.lower(*given, **fixed).compile()

    def compile(self) -> None:
        """All but the prefill."""
        job = self.job
        state = jax.eval_shape(lambda: start(job))
        _until.lower(job.lm, job.drafter, job.verifier, job.num_speculative_tokens, state, jnp.int32(0)).compile()

    def measure(self, repeats: int = 3) -> tuple[float, float]:
        """Seconds of a round, and the tokens that a row kept in one on average.

        From the difference to runs of a fifth of the rounds, so that the host's share of a run is left out.

        Raises:
          ValueError: the machine is too busy for a difference.
        """
        job = self.job
        state = self._run_to(1, start(job))  # the draft reads the prompts here
        lengths = np.asarray(state.lengths)

        def run(rounds: int) -> jax.Array:
            nonlocal state
            begin = jnp.asarray(lengths)
            cache = kv.with_lengths(state.cache, begin - 1)
            # A row that kept everything has met its limit, and is none the less there again.
            once, on = jnp.ones_like(state.rounds), jnp.ones_like(state.active)
            cut = state._replace(lengths=begin, cache=cache, rounds=once, active=on)
            state = self._run_to(1 + rounds, job.drafter.commit(job.lm, cut, None))
            return state.lengths

        few = self.rounds // 5
        for _ in range(5):  # on a busy machine fewer rounds can take longer
            short, long = (measure.timed(partial(run, rounds), repeats) for rounds in (few, self.rounds))
            kept = np.mean(np.asarray(state.lengths) - lengths) / self.rounds
            if short < long:
                return (long - short) / (self.rounds - few), float(kept)
        raise ValueError(
            f"{self.rounds} rounds took {long * 1e3:.2f} ms and {few} took {short * 1e3:.2f}, five times over: too "
            "much else runs on this machine; try again when less does"
        )

    def _run_to(self, rounds: int, state: DecodeState) -> DecodeState:
        job = self.job
        return _until(job.lm, job.drafter, job.verifier, job.num_speculative_tokens, state, jnp.int32(rounds))


def start(job: Job) -> DecodeState:
    """The state after the target has read the prompts; a lazy drafter has read nothing yet."""
    given, fixed = _prefill_of(job)
    batch, capacity = job.request.tokens.shape
    own = job.drafter.init(job.lm, batch, capacity, job.num_speculative_tokens)
    return decode.start_jit(*given, **fixed)._replace(drafter=own)


def _prefill_of(job: Job) -> tuple[tuple, dict]:
    """Arguments of decode.start for the target's prefill by itself."""
    return (job.lm, DRAFTERS["none"], job.request, 0), job.fixed


@partial(jax.jit, static_argnames=("verifier", "size"), donate_argnames="state")
def _until(
    target: LM, drafter: Drafter, verifier: Verifier, size: int, state: DecodeState, rounds: jax.Array
) -> DecodeState:
    """Rounds until i32[] ``rounds`` have been done; traced, so the loop is of the kind that ``generate`` runs."""

    def body(state: DecodeState) -> DecodeState:
        return decode.round(target, drafter, verifier, size, state)[0]

    return lax.while_loop(lambda state: jnp.any(state.active & (state.rounds < rounds)), body, state)
