"""A running request that gives its tokens one by one."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode import rows
from specjax.decode.types import RoundInfo
from specjax.generation import trace
from specjax.generation.completion import Completion, RowRound, result_of
from specjax.generation.result import Event, Result
from specjax.models import axes

if TYPE_CHECKING:
    from specjax.generation.job import Job


class Stream:
    """An iterator over a running request: one :class:`Event` for each token. The caller may stop iterating at any time.

    Iterating raises NoDistributionError at the end if no token of a row had a finite logit.
    """

    def __init__(self, job: "Job"):
        self._job = job
        self._rows = [Completion(job, index) for index in range(len(job.prompts))]
        self._infos: list[RoundInfo] = []  # the rounds so far, in NumPy arrays
        self._trace: list[list[dict]] = [[] for _ in job.prompts]
        self._described = 0  # the number of rounds that the trace holds
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._events = self._run()

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def __next__(self) -> Event:
        return next(self._events)

    def result(self) -> Result:
        """The result of all tokens so far.

        Raises:
          NoDistributionError: no token of a row had a finite logit.
        """
        return result_of(self._job, self._rows, self._seconds)

    @property
    def trace(self) -> list[list[dict]]:
        """For each row, its rounds up to the last token that the caller has read.

        A round is a dict with the keys of ``specjax.record.ROUND``.
        """
        for info in self._infos[self._described :]:
            rounds = trace.rounds_of(info, self._job.decoder.target.tokenizer)
            for row, entry in zip(self._trace, rounds, strict=True):
                row += [entry] if entry else []
        self._described = len(self._infos)
        known = zip(self._trace, self._rows, self._job.prompts, strict=True)
        return [trace.cut(rounds, len(prompt) + len(row.tokens)) for rounds, row, prompt in known]

    def _run(self) -> Iterator[Event]:
        """Runs prefill and then rounds, and yields the tokens of each round."""
        decoder, request, began = self._job.decoder, self._job.request, time.perf_counter()
        state = self._job.start()
        running = np.asarray(request.limit) > np.asarray(request.prompt_lengths)
        for row, alive in zip(self._rows, running, strict=True):
            row.finish_reason = None if alive else "length"
        if not running.any():
            return
        jax.block_until_ready(state.lengths)
        self._seconds["prefill"] = time.perf_counter() - began
        released = [False] * len(self._rows)  # the rows that the host has ended so far
        began = time.perf_counter()
        state, info = decoder.round(state)
        while True:
            # The next round is dispatched before the host reads the last one, so that the device never waits.
            state, following = decoder.round(state)
            info = axes.on_host(info, decoder.target.mesh)
            self._seconds["decode"] = time.perf_counter() - began
            self._infos.append(info)
            for index, row in enumerate(self._rows):
                if row.running:
                    yield from row.advance(_of_row(info, index))
            if not any(row.running for row in self._rows):
                break
            stopped = [row.text is not None and row.text.stopped for row in self._rows]
            if stopped != released:  # the device knows nothing of stop strings
                state, released = rows.release(state, jnp.asarray(stopped)), stopped
            info = following
        self.result()  # raises NoDistributionError if a row failed


def _of_row(info: RoundInfo, row: int) -> RowRound:
    """What a round, in NumPy arrays, says of one row."""
    committed, accepted, drafted = (int(x[row]) for x in (info.committed, info.accepted, info.drafted))
    tokens, chosen, top = jax.tree.map(lambda x: x[row], (info.tokens, info.logprobs, info.top))
    return RowRound(committed, accepted, drafted, bool(info.active[row]), bool(info.failed[row]), tokens, chosen, top)
