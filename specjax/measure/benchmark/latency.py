"""Times the way to the first tokens: both models read the prompt, then the first round generates."""

import statistics
import time
from collections.abc import Sequence
from functools import partial

import jax

from specjax.generation.generate import prepare
from specjax.generation.job import Job
from specjax.measure.benchmark.case import Case
from specjax.measure.benchmark.table import Table
from specjax.measure.benchmark.timed import side_by_side


def latency(case: Case, table: Table, lengths: Sequence[int]) -> None:
    """Times the prefill of both models and the first round, for each prompt length.

    Each time ends when the host can read the round's tokens. There is one row, and decoding is greedy.

    Args:
      case: the models and the request.
      table: the table that the figures go to.
      lengths: the prompt lengths in tokens.
    """
    size, jobs = case.num_speculative_tokens, {}
    drafter = case.drafts[0].drafter(size)
    for length in lengths:
        asked = dict(drafter=drafter, num_speculative_tokens=size, max_new_tokens=4 * (size + 1))
        jobs[length] = prepare(case.target, case.prompts(1, length), **asked)
    side_by_side(partial(job.compile, streaming=True) for job in jobs.values())
    for length, job in jobs.items():
        prefill, first, later = _times(job)
        table.add(f"prompt of {length}, prefill of both models", prefill)
        note = f"a later round {later * 1e3:.1f} ms, first tokens after {(prefill + first) * 1e3:.1f} ms"
        name = f"prompt of {length}, first round"
        table.add(name, first, None, note, later_ms=later * 1e3, first_tokens_ms=(prefill + first) * 1e3)


def _times(job: Job, repeats: int = 3) -> tuple[float, ...]:
    """The median seconds of the prefill, of the first round, and of the second round."""
    found = []
    for _ in range(repeats + 1):  # the first repetition is not counted
        clock = [time.perf_counter()]
        state = jax.block_until_ready(job.start())
        clock.append(time.perf_counter())
        for _ in range(2):
            state, _ = jax.block_until_ready(job.decoder.round(state))
            clock.append(time.perf_counter())
        found.append([after - before for before, after in zip(clock[:-1], clock[1:], strict=True)])
    return tuple(map(statistics.median, zip(*found[1:], strict=True)))
