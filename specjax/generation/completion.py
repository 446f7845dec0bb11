"""The output of one row as the host knows it, and the result of all rows."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from specjax.decode.likeliest import Top
from specjax.decode.numeric import per_row
from specjax.decode.types import History
from specjax.generation import logprobs
from specjax.generation.metrics import Metrics, own_origin
from specjax.generation.result import Event, NoDistributionError, Result
from specjax.generation.stops import stop_strings, stop_token_ids
from specjax.text.text_stream import TextStream

if TYPE_CHECKING:
    from specjax.generation.job import Job


class RowRound(NamedTuple):
    """One round of one row, in NumPy arrays and Python numbers: what :class:`RoundInfo` says of the row."""

    # How many tokens were committed, how many of these were drafted, and how many drafted tokens were verified.
    committed: int
    accepted: int
    drafted: int
    # Whether the row runs on after the round.
    active: bool
    # Whether the row has ended because no token had a finite logit.
    failed: bool
    # i32[K+1] The new tokens; the first ``committed`` of them count.
    tokens: np.ndarray
    # f32[K+1] The log-probability of each new token. None: nobody asked.
    logprobs: np.ndarray | None
    # [K+1, n] The likeliest tokens at each position. None: nobody asked.
    top: Top | None


class Completion:
    """Tokens, text, log-probabilities and acceptance of one row, as far as the row has come.

    Args:
      job: the job that the row belongs to.
      index: the row's index in the job.
    """

    def __init__(self, job: "Job", index: int):
        self.job, self.index = job, index
        # The number of new tokens before which no stop string ends the row.
        self.least = per_row("min_new_tokens", job.options.min_new_tokens, len(job.prompts))[index] or 0
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[list[tuple[int, float]]] = []
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self.finish_reason: str | None = None
        self.failed = False
        tokenizer = job.decoder.target.tokenizer
        self.text = None if tokenizer is None else TextStream(tokenizer, stop_strings(job.options))

    @classmethod
    def of(
        cls, job: "Job", row: int, tokens: np.ndarray, lengths: np.ndarray, failed: np.ndarray, history: History
    ) -> "Completion":
        """The completion of a row that has ended, from the arrays of a whole run.

        Args:
          job: the job that ran.
          row: the row's index in the batch.
          tokens: i32[B, L], prompts and new tokens.
          lengths: i32[B], the number of tokens of each row, prompt included.
          failed: bool[B], whether each row ended because no token had a finite logit.
          history: the history of the run, in NumPy arrays.
        """
        done, new = cls(job, row), slice(len(job.prompts[row]), lengths[row])
        done.tokens = tokens[row, new].tolist()
        done.drafted, done.accepted = (
            x[row, : history.rounds[row]].tolist() for x in (history.drafted, history.accepted)
        )
        done.learn(history.logprobs, history.top, (row, new))
        done.failed = bool(failed[row])
        done.finish_reason = None if done.failed else done.reason_of_end()
        return done

    @property
    def running(self) -> bool:
        """Whether more tokens may come."""
        return self.finish_reason is None and not self.failed

    def advance(self, seen: RowRound) -> Iterator[Event]:
        """Adds the tokens of one round, and yields an event for each. Tokens after a stop string are dropped."""
        if seen.committed:
            self.drafted.append(seen.drafted)
            self.accepted.append(seen.accepted)
        origins = ["accepted"] * seen.accepted + [own_origin(seen.accepted, seen.drafted)]
        for i in range(seen.committed):
            self.tokens.append(int(seen.tokens[i]))
            if logprobs.wanted(self.job.options.logprobs):
                self.learn(seen.logprobs, seen.top, slice(i, i + 1))
            piece = self._text()
            if self.finish_reason is None and i == seen.committed - 1 and not (seen.active or seen.failed):
                self.finish_reason = self.reason_of_end()
            if self.text and self.finish_reason:
                piece += self.text.flush()
            logprob, top = self.logprobs[-1] if self.logprobs else None, self.top[-1] if self.top else None
            accepted, token = i < seen.accepted, self.tokens[-1]
            yield Event(self.index, token, piece, accepted, self.finish_reason, origins[i], logprob, top)
            if self.finish_reason:
                return
        self.failed = seen.failed

    def _text(self) -> str:
        """The text that the last token adds. A stop string in the text ends the row."""
        if self.text is None:
            return ""
        self.text.watching = len(self.tokens) > self.least
        piece = self.text.push(self.tokens[-1])
        if self.text.stopped:
            self.finish_reason = "stop"
        return piece

    def learn(self, chosen: Any, top: Any, where: Any) -> None:
        """Adds the log-probabilities of more tokens.

        Args:
          chosen: f32[..., T], the log-probabilities of the generated tokens; None: not asked for.
          top: the likeliest tokens of each position, a ``Top`` of arrays [..., T, n]; None: not asked for.
          where: the index of the added tokens in these arrays: a slice of positions, after the row if there are rows.
        """
        chosen, top = jax.tree.map(lambda x: x[where], (chosen, top))
        self.logprobs += [] if chosen is None else chosen.tolist()
        self.top += [] if top is None else logprobs.pairs(top)

    def reason_of_end(self) -> str:
        """Why the row ended: "stop" if its last token is a stop token of the row, else "length"."""
        stop_ids = np.asarray(self.job.request.stop_ids)[self.index]
        return "stop" if self.tokens and self.tokens[-1] in stop_ids else "length"


def result_of(job: "Job", rows: list[Completion], seconds: dict[str, float]) -> Result:
    """The result of all rows.

    Args:
      job: the job that ran.
      rows: the completion of each row.
      seconds: wall time of "prefill" and of "decode".

    Raises:
      NoDistributionError: a row failed. The error holds the result.
    """
    tokenizer, size = job.decoder.target.tokenizer, job.decoder.num_speculative_tokens
    result = Result(
        tokens=[list(row.tokens) for row in rows],
        texts=None if tokenizer is None else [tokenizer.decode(row.tokens) for row in rows],
        finish_reasons=[row.finish_reason for row in rows],
        metrics=[Metrics.from_record(row.drafted, row.accepted, len(row.tokens), size) for row in rows],
        logprobs=[list(row.logprobs) for row in rows] if logprobs.wanted(job.options.logprobs) else None,
        top_logprobs=[list(row.top) for row in rows] if job.decoder.top_logprobs else None,
        prompt_tokens=job.prompts,
        stop_token_ids=stop_token_ids(job.decoder.target, job.options),
        date=job.options.date,
        seeds=list(job.options.seed),  # type: ignore[arg-type]
        seconds=dict(seconds),
    )
    failed = [(i, len(row.tokens)) for i, row in enumerate(rows) if row.failed]
    if failed:
        raise NoDistributionError(
            "no token has a finite logit in "
            + ", ".join(f"row {i} after {n} new tokens" for i, n in failed)
            + ": the weights hold NaN or infinity, or logit_bias, allowed_token_ids and the other sampling options "
            "together forbid every token",
            result,
        )
    return result
