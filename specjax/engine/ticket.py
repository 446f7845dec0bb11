"""A request on its way through the engine: what was asked, where the request stands, and what it has so far."""

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from specjax.decode import random
from specjax.decode.sampling import NO_TOKEN
from specjax.engine.programs import Limits, Row
from specjax.engine.saved import Samples, Saved
from specjax.generation import logprobs
from specjax.generation.completion import Completion
from specjax.generation.job import Job
from specjax.generation.options import Options
from specjax.generation.prepare import job_of

if TYPE_CHECKING:
    from specjax.engine.handle import Handle
    from specjax.engine.parts import Part

# Sampling parameters that every round computes. A request that uses another one needs the full round.
SIMPLE = ("temperature", "vocabulary")


class Ticket:
    """One request.

    The thread that submits the request makes the ticket. From then on only the engine's thread changes it.

    Args:
      job: the request, checked, with one prompt.
      limits: the sizes of the engine's arrays.
      priority: lower numbers are admitted first.
      keys: the keys of those pages of the prompt that may be shared, as ``prefix_keys`` makes them.
      samples: the samples of the same prompt, this one among them.

    Raises:
      ValueError: the request lists more tokens than the engine has room for.
    """

    def __init__(self, job: Job, limits: Limits, priority: int, keys: list[bytes], samples: Samples):
        self.job = job
        self.priority = priority
        self.handle: Handle  # set by the engine before its thread sees the ticket
        self.prompt = job.prompts[0]
        self.limit = int(job.request.limit[0])
        self.completion = Completion(job, 0)
        self.row = _row(job, limits)
        self.full = logprobs.wanted(job.options.logprobs) or any(
            value is not None and name not in SIMPLE for name, value in job.request.sampling._asdict().items()
        )
        self.keys, self.samples = keys, samples
        samples.waiting.add(self)
        self.part: Part  # where the request has its pages; set when it gets them
        self.pages: list[int] = []  # the pages in the request's table, in order
        self.cached_tokens = 0  # prompt tokens whose entries were found in the prefix cache
        self.read = 0  # prompt tokens that are read so far
        self.slot: int | None = None  # None: the request is not running
        self.place = (0, 0)  # in the queue; a request with a lower place is the older one
        self.saved: Saved | None = None  # what the request goes on from after it was swapped out
        self.times = {"submitted": time.perf_counter()}  # then "admitted", "running", "first token" and "ended"

    @property
    def length(self) -> int:
        """The number of tokens so far, prompt included, as far as the host has learned of them."""
        return len(self.prompt) + len(self.completion.tokens)

    @property
    def to_read(self) -> int:
        """The number of prompt tokens that prefill reads: all but the last one, which the first round feeds."""
        return len(self.prompt) - 1

    def mark(self, what: str) -> None:
        """Notes the time at which something happened for the first time."""
        self.times.setdefault(what, time.perf_counter())

    def seconds(self) -> dict[str, float]:
        """The wall time of "queue", "prefill" and "decode"."""
        marks = [self.times.get(name) for name in ("submitted", "admitted", "running", "ended")]
        spans = zip(marks, marks[1:], strict=False)
        return {
            name: 0.0 if a is None or b is None else b - a
            for name, (a, b) in zip(("queue", "prefill", "decode"), spans, strict=True)
        }


def job_for(lm: Any, prompt: Any, options: Options) -> Job:
    """The checked request of one prompt: token ids, a string or messages. All its arrays are NumPy's.

    So submitting a request never waits for the device's work. In place of its random key, the request has the key's
    two words.

    Raises:
      ValueError: an option or the prompt can't be used.
    """
    if isinstance(prompt, bytes) or not isinstance(prompt, str | Sequence | np.ndarray | jax.Array):
        raise ValueError(
            f"prompt must be one prompt: a string, a conversation (a list of messages) or a list of token ids, got "
            f"{prompt!r}"
        )
    return job_of(lm, [prompt], options, random.key_words)


def with_seed(job: Job, seed: int) -> Job:
    """The same request with another seed."""
    words: Any = random.key_words([seed])
    request = job.request._replace(key=words)
    return dataclasses.replace(job, request=request, options=dataclasses.replace(job.options, seed=[seed]))


def _row(job: Job, limits: Limits) -> Row:
    """The arrays of a request, in the engine's sizes. The table is empty."""
    request, size = job.request, len(job.prompts[0])
    stops = int(np.sum(request.stop_ids != NO_TOKEN))
    if stops > limits.stops:
        raise ValueError(f"a request of this engine may have {limits.stops} stop tokens, got {stops}")
    tokens = np.zeros((1, limits.tokens), np.int32)
    tokens[0, :size] = job.prompts[0]
    return Row(
        key=request.key,
        sampling=request.sampling.full(job.decoder.target.vocab_size, limits.lists, limits.lists, limits.stops),
        stop_ids=_fitted(request.stop_ids, limits.stops),
        limit=request.limit,
        prompt_lengths=request.prompt_lengths,
        tokens=tokens,
        table=np.zeros((1, 0), np.int32),
    )


def _fitted(ids: Any, size: int) -> np.ndarray:
    """Lists of ids i32[1, E], cut or padded with NO_TOKEN to i32[1, size]."""
    return np.pad(ids, ((0, 0), (0, max(0, size - ids.shape[1]))), constant_values=NO_TOKEN)[:, :size]
