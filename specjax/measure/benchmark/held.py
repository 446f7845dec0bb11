"""The device memory that a running engine holds, beside what ``specjax.memory.report`` says of the engine."""

import jax

from specjax.engine.engine import Engine
from specjax.measure import memory
from specjax.measure.benchmark.case import Case
from specjax.measure.benchmark.table import Table
from specjax.report.progress import say


def held(case: Case, table: Table, batches: tuple[int, ...]) -> None:
    """Adds the section "memory" to the table: bytes for each number of requests, from the fewest to the most.

    "reported" is the report's total, and "arrays" the bytes of all arrays on the devices while the requests run, both
    with one copy of an array that several devices hold. "peak" is the most that JAX's allocator has given away on the
    first device since the process began: arrays, and what programs need while they run. A CPU has no such figure.

    Args:
      case: the models and the request.
      table: the table that the figures go to.
      batches: the numbers of requests at once. The engine has as many slots.
    """
    drafter = case.drafts[0].drafter(case.num_speculative_tokens)
    capacity = case.given_length + case.max_new_tokens
    for batch in sorted(batches):
        with Engine(
            case.target, drafter, num_speculative_tokens=case.num_speculative_tokens, slots=batch, capacity=capacity
        ) as engine:
            prompts = case.prompts(batch)
            handles = [engine.submit(p, max_new_tokens=case.max_new_tokens, ignore_eos=True) for p in prompts]
            next(handles[0])
            found = engine.between_rounds(_arrays).result()
            for handle in handles:
                handle.result()
            reported = memory.report(engine)["total"]
        stats = jax.local_devices()[0].memory_stats() or {}
        peak = stats.get("peak_bytes_in_use")
        table.sections.setdefault("memory", {})[batch] = {"reported": reported, "arrays": found, "peak": peak}
        table.save()
        most = "no figure on this device" if peak is None else f"{peak / 1e9:.3f} GB"
        say(
            f"memory, {batch} requests of {capacity} tokens: reported {reported / 1e9:.3f} GB, arrays "
            f"{found / 1e9:.3f} GB ({found / reported:.3f}), peak of the process {most}"
        )


def _arrays() -> int:
    """The bytes of all arrays."""
    return sum(x.nbytes for x in jax.live_arrays())
