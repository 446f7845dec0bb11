"""The output of one row as the host knows it, and the result of all rows."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from specjax.decode.types import History
from specjax.generation import logprobs
from specjax.generation.metrics import Metrics
from specjax.generation.result import NoDistributionError, Result
from specjax.generation.stops import stop_strings, stop_token_ids
from specjax.text.text_stream import TextStream

if TYPE_CHECKING:
    from specjax.generation.job import Job


class Completion:
    """Tokens, text, log-probabilities and acceptance of one row, as far as the row has come."""

    def __init__(self, job: "Job"):
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
        done, new = cls(job), slice(len(job.prompts[row]), lengths[row])
        done.tokens = tokens[row, new].tolist()
        done.drafted, done.accepted = (
            x[row, : history.rounds[row]].tolist() for x in (history.drafted, history.accepted)
        )
        done.learn(history.logprobs, history.top, (row, new))
        done.failed = bool(failed[row])
        done.finish_reason = None if done.failed else done.reason_of_end(job, row)
        return done

    def learn(self, chosen: Any, top: Any, where: tuple) -> None:
        """Adds the log-probabilities of more tokens.

        Args:
          chosen: f32[B, T], the log-probabilities of the generated tokens; None: not asked for.
          top: the likeliest tokens of each position, a ``Top`` of arrays [B, T, n]; None: not asked for.
          where: the index of the added tokens in these arrays: the row, and a slice of positions.
        """
        chosen, top = jax.tree.map(lambda x: x[where], (chosen, top))
        self.logprobs += [] if chosen is None else chosen.tolist()
        self.top += [] if top is None else logprobs.pairs(top)

    def reason_of_end(self, job: "Job", row: int) -> str:
        """Why the row ended: "stop" if its last token is a stop token of the row, else "length"."""
        stop_ids = np.asarray(job.request.stop_ids)[row]
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
