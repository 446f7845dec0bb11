"""A running request that gives its tokens one by one."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode import rows
from specjax.decode.numeric import per_row
from specjax.decode.types import RoundInfo
from specjax.generation import logprobs, trace
from specjax.generation.completion import Completion, result_of
from specjax.generation.metrics import own_origin
from specjax.generation.result import Event, Result

if TYPE_CHECKING:
    from specjax.generation.job import Job


class Stream:
    """An iterator over a running request: one :class:`Event` for each token. The caller may stop iterating at any time.

    Iterating raises NoDistributionError at the end if no token of a row had a finite logit.
    """

    def __init__(self, job: "Job"):
        self._job = job
        self._rows = [Completion(job) for _ in job.prompts]
        waits = per_row("min_new_tokens", job.options.min_new_tokens, len(job.prompts))
        self._least = [least or 0 for least in waits]  # the number of new tokens before a stop string may end each row
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
            info = jax.device_get(info)
            self._seconds["decode"] = time.perf_counter() - began
            self._infos.append(info)
            for index, row in enumerate(self._rows):
                if row.finish_reason is None and not row.failed:
                    yield from self._advance(index, row, info)
            if all(row.finish_reason is not None or row.failed for row in self._rows):
                break
            stopped = [row.text is not None and row.text.stopped for row in self._rows]
            if stopped != released:  # the device knows nothing of stop strings
                state, released = rows.release(state, jnp.asarray(stopped)), stopped
            info = following
        self.result()  # raises NoDistributionError if a row failed

    def _advance(self, index: int, row: Completion, info: RoundInfo) -> Iterator[Event]:
        """Adds the tokens of one round to one row, and yields an event for each token."""
        row.failed = bool(info.failed[index])
        if row.failed:
            return
        drafted, accepted, committed = (int(x[index]) for x in (info.drafted, info.accepted, info.committed))
        row.drafted.append(drafted)
        row.accepted.append(accepted)
        origins = ["accepted"] * accepted + [own_origin(accepted, drafted)]
        for i in range(committed):
            row.tokens.append(int(info.tokens[index, i]))
            if logprobs.wanted(self._job.options.logprobs):
                row.learn(info.logprobs, info.top, (index, slice(i, i + 1)))
            piece = self._text(index, row)
            if row.finish_reason is None and i == committed - 1 and not info.active[index]:
                row.finish_reason = row.reason_of_end(self._job, index)
            if row.text and row.finish_reason:
                piece += row.text.flush()
            logprob, top = row.logprobs[-1] if row.logprobs else None, row.top[-1] if row.top else None
            yield Event(index, row.tokens[-1], piece, i < accepted, row.finish_reason, origins[i], logprob, top)
            if row.finish_reason:
                return

    def _text(self, index: int, row: Completion) -> str:
        """The text that the row's last token adds. A stop string in the text ends the row."""
        if row.text is None:
            return ""
        row.text.watching = len(row.tokens) > self._least[index]
        piece = row.text.push(row.tokens[-1])
        if row.text.stopped:
            row.finish_reason = "stop"
        return piece
