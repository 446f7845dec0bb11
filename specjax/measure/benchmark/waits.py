"""How long requests of an engine wait: for their next token while a long prompt is read, and for their first token.

The first token of a prompt that the prefix cache knows should come after one round and one chunk.
"""

import itertools
import statistics
import time

from specjax.engine.engine import Engine
from specjax.measure.benchmark.case import Case
from specjax.measure.benchmark.serving import clock
from specjax.measure.benchmark.table import Table
from specjax.models.cache import PAGE

RUNNING = 4  # requests that decode while the long prompt is read


def waits(case: Case, table: Table, known: int, long: int, chunk: int | None) -> None:
    """Times both waits.

    Args:
      case: the models and the request.
      table: the table that the figures go to.
      known: the tokens of the prompt that is submitted twice.
      long: the tokens of the prompt that is read while others decode.
      chunk: the prompt tokens that one call of the engine reads; None: the engine's default.
    """
    size = case.num_speculative_tokens
    others = RUNNING * (case.prompt_length + case.max_new_tokens + 2 * PAGE)
    with Engine(
        case.target, case.drafts[0].drafter(size), num_speculative_tokens=size, slots=2 * RUNNING,
        capacity=long + case.max_new_tokens, kv_tokens=long + 2 * known + others + 8 * PAGE, prefill_chunk=chunk,
    ) as engine:  # fmt: skip
        engine.warmup()
        [prompt] = case.prompts(1, known)
        misses, hits = (_first_token(engine, prompt) for _ in range(2))
        for name, (seconds, cached) in (("not known", misses), ("known", hits)):
            table.add(f"prompt of {known}, {name}, first token", seconds, None, f"{cached} tokens found", cached=cached)
        stamps: list[list[float]] = [[] for _ in range(RUNNING)]
        running = [
            engine.submit(p, max_new_tokens=case.max_new_tokens, ignore_eos=True, listener=clock(stamps[row]))
            for row, p in enumerate(case.prompts(RUNNING))
        ]
        while min(map(len, stamps)) < 4 * (size + 1):
            time.sleep(0.001)
        began = time.perf_counter()
        handle = engine.submit(case.prompts(1, long)[0], max_new_tokens=2, ignore_eos=True)
        next(handle)
        read = time.perf_counter()
        for request in running:
            request.abort()
    quiet, busy = ([gap for row in stamps for gap in _gaps(row, *span)] for span in ((0, began), (began, read)))
    table.add("time between rounds, nothing else to do", statistics.median(quiet), None, "median")
    note = f"longest {max(busy) * 1e3:.1f} ms; the prompt was read in {(read - began) * 1e3:.0f} ms"
    table.add(f"time between rounds, a prompt of {long} read", statistics.median(busy), None, note, longest=max(busy))


def _first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """The seconds from submission to the first token of an idle engine, and the tokens that the prefix cache had."""
    began = time.perf_counter()
    handle = engine.submit(prompt, max_new_tokens=1, ignore_eos=True)
    next(handle)
    return time.perf_counter() - began, handle.cached_tokens


def _gaps(stamps: list[float], first: float, last: float) -> list[float]:
    """The times between rounds of one request within a span. Tokens of one round come within a millisecond."""
    inside = [moment for moment in stamps if first <= moment <= last]
    return [b - a for a, b in itertools.pairwise(inside) if b - a > 1e-3]
