"""Times rounds in the middle of a text.

The first round of a text, in which the draft reads the prompt, and the last one, which a limit may cut, are left out.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.decode.decoder import Decoder
from specjax.decode.history import history_of
from specjax.decode.round import round as one_round
from specjax.decode.types import DecodeState, Drafter
from specjax.generation.generate import prepare
from specjax.generation.job import Job
from specjax.measure.benchmark import timed as measure
from specjax.models import cache as kv
from specjax.models.lm import LM


class Steady(NamedTuple):
    """Rounds of a job that are timed together."""

    # The job.
    job: Job
    # The number of rounds.
    rounds: int

    @classmethod
    def of(cls, lm: LM, prompts: list[list[int]], drafter: Drafter | None, size: int, rounds: int, capacity: int):
        """Greedy rounds of K = ``size``. There is room for ``rounds`` + 1 whole blocks, so that no block is cut.

        Args:
          lm: the target.
          prompts: the token ids of each prompt.
          drafter: the drafter; None: plain decoding.
          size: K.
          rounds: the number of rounds that are timed together.
          capacity: the number of tokens that each row has room for.
        """
        new = (rounds + 1) * (size + 1)
        job = prepare(
            lm, prompts, drafter=drafter, num_speculative_tokens=size, max_new_tokens=new, ignore_eos=True,
            capacity=capacity,
        )  # fmt: skip
        return cls(job, rounds)

    def compile_prefill(self) -> None:
        """Compiles the prefill. Jobs of one batch size and capacity share this program, whatever their drafter."""
        self.job.plain().compile_start()

    def compile(self) -> None:
        """Compiles everything but the prefill."""
        state = jax.eval_shape(lambda: start(self.job))
        _until.lower(self.job.decoder, state, jnp.int32(0)).compile()

    def measure(self, repeats: int = 3) -> tuple[float, float]:
        """Times the rounds.

        The time of a round follows from the difference between runs of all rounds and runs of a fifth of the rounds.
        The host's share of a run thus cancels out.

        Returns:
          The seconds of a round, and the mean number of tokens that a row kept in a round.

        Raises:
          ValueError: the machine is too busy: fewer rounds took as long as more rounds.
        """
        job = self.job
        state = self._run_to(1, start(job))  # in this first round the draft reads the prompts
        lengths = np.asarray(state.lengths)

        def run(rounds: int) -> jax.Array:
            nonlocal state
            begin = jnp.asarray(lengths)
            cache = kv.with_lengths(state.cache, begin - 1)
            # A row that kept all its drafts has reached its limit. It is made active again for the next run.
            history = history_of(state)._replace(rounds=jnp.ones_like(history_of(state).rounds))
            cut = state._replace(lengths=begin, cache=cache, history=history, active=jnp.ones_like(state.active))
            own = job.decoder.drafter.commit(job.decoder.target, state.drafter, cut, None)
            state = self._run_to(1 + rounds, cut._replace(drafter=own))
            return state.lengths

        few = self.rounds // 5
        for _ in range(5):  # on a busy machine fewer rounds can take longer
            short, long = (measure.timed(partial(run, rounds), repeats) for rounds in (few, self.rounds))
            kept = np.mean(np.asarray(state.lengths) - lengths) / self.rounds
            if short < long:
                return (long - short) / (self.rounds - few), float(kept)
        raise ValueError(
            f"{self.rounds} rounds took {long * 1e3:.2f} ms and {few} took {short * 1e3:.2f} ms in the last of "
            "five attempts: too much else runs on this machine; try again when less does"
        )

    def _run_to(self, rounds: int, state: DecodeState) -> DecodeState:
        return _until(self.job.decoder, state, jnp.int32(rounds))


def start(job: Job) -> DecodeState:
    """The state after the target has read the prompts. The drafter has read nothing yet and catches up later."""
    decoder, (batch, capacity) = job.decoder, job.tokens.shape
    own = decoder.drafter.init(decoder.target, batch, capacity, decoder.num_speculative_tokens)
    return job.plain().start()._replace(drafter=own)


@partial(jax.jit, donate_argnames="state")
def _until(decoder: Decoder, state: DecodeState, rounds: jax.Array) -> DecodeState:
    """Runs rounds until ``rounds`` i32[] are done. A drafter that fell behind first catches up.

    ``rounds`` is traced, so the loop is a while loop as in ``generate``.
    """

    def body(state: DecodeState) -> DecodeState:
        return one_round(decoder, state)[0]

    state = state._replace(drafter=decoder.drafter.resume(decoder.target, state.drafter, state))
    return lax.while_loop(lambda state: jnp.any(state.active & (history_of(state).rounds < rounds)), body, state)
