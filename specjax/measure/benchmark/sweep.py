"""Rounds over batch and draft length: what speculation gains at every acceptance rate, and where it stops paying.

A round's shapes, and so its time, depend on B rows and K drafted tokens, not on what is accepted. So each (B, K) is
timed once, and the speedup at any alpha is theorem 3.8 with these times: expected tokens a round, times a plain step
at the same B, over the round. Tokens a round are measured too, as a check on the expectation.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from specjax.drafters import DraftModel
from specjax.drafting import theory
from specjax.generation import requests
from specjax.measure.benchmark.case import Case
from specjax.measure.benchmark.steady import Steady
from specjax.measure.benchmark.table import Table
from specjax.measure.benchmark.timed import side_by_side
from specjax.report.progress import bar, say
from specjax.testing import partly_right, planted_lm


def sweep(
    case: Case,
    table: Table,
    batches: Sequence[int],
    sizes: Sequence[int],
    check_alphas: Sequence[float] = (),
    rounds: int = 20,
) -> None:
    """Adds a row for each batch and size, and the section ``sweep`` to the table.

    Args:
      batches, sizes: every B and every K >= 1 to time.
      check_alphas: other acceptance rates at which tokens a round are measured, at the largest batch.
      rounds: timed together.
    """
    largest = max(sizes)
    capacity = requests.bucket(case.prompt_length + (rounds + 2) * (largest + 1), 128)

    def steady(batch: int, size: int, draft=case.draft) -> Steady:
        drafter = DraftModel(draft) if size else None
        return Steady.of(case.target, case.prompts(batch), drafter, size, rounds, capacity)

    points_in_all = len(batches) * (1 + len(sizes)) + len(check_alphas) * len(sizes)
    line = bar(desc="sweep", total=points_in_all, unit="point")
    found: dict[str, Any] = {"rounds": rounds, "capacity": capacity, "plain": {}, "points": [], "checks": []}
    for batch in batches:
        points = {size: steady(batch, size) for size in (0, *sizes)}
        side_by_side([points[0].compile_prefill, *(point.compile for point in points.values())])
        for size, point in points.items():
            seconds, tokens = point.measure()
            line.update()
            if size == 0:
                plain = found["plain"][str(batch)] = seconds
                table.add(f"sweep, B = {batch}, plain step", seconds, case.step_floor)
                continue
            expected = theory.expected_tokens(case.alpha, size)
            found["points"].append({"batch": batch, "size": size, "seconds": seconds})
            table.sections["sweep"] = found  # from its first point on there is something to draw
            found["checks"].append(
                {"batch": batch, "size": size, "alpha": case.alpha, "tokens": tokens, "expected": expected}
            )
            table.add(
                f"sweep, B = {batch}, K = {size}, round",
                seconds,
                size * case.draft_floor + case.step_floor,
                f"{tokens:.2f} tokens a row, expected {expected:.2f}; {tokens * plain / seconds:.2f} x plain",
            )
    for alpha in check_alphas:
        guess = partly_right(case.successor, alpha, case.seed + 1)
        draft = case.drafting(planted_lm(case.draft.config, guess, 2 * case.seed + 1, case.draft.dtype))
        for size in sizes:
            batch = max(batches)
            tokens, expected = steady(batch, size, draft).measure(repeats=1)[1], theory.expected_tokens(alpha, size)
            found["checks"].append(
                {"batch": batch, "size": size, "alpha": alpha, "tokens": tokens, "expected": expected}
            )
            say(f"alpha = {alpha}, B = {batch}, K = {size}: {tokens:.2f} tokens a round, expected {expected:.2f}")
            line.update()
    line.close()
    table.save()


def speedup(found: dict[str, Any], batch: int, size: int, alpha: float) -> float:
    """Times plain decoding at the same batch, of a section that :func:`sweep` wrote."""
    seconds = next(p["seconds"] for p in found["points"] if (p["batch"], p["size"]) == (batch, size))
    return theory.expected_tokens(alpha, size) * found["plain"][str(batch)] / seconds


def break_even(found: dict[str, Any], batch: int) -> float | None:
    """The lowest acceptance rate, to a thousandth, at which some K is faster than plain decoding; None: at none."""
    sizes = axes(found)[1]
    pays = (i / 1000 for i in range(1001) if any(speedup(found, batch, size, i / 1000) > 1 for size in sizes))
    return next(pays, None)


def axes(found: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The batches that were timed at every size of the section (one cut short was not), and the sizes; both rising."""
    sizes = {p["size"] for p in found["points"]}
    counts = Counter(p["batch"] for p in found["points"])
    return sorted(batch for batch in counts if counts[batch] == len(sizes)), sorted(sizes)


def markdown(found: dict[str, Any], alphas: Sequence[float]) -> str:
    """Two tables: the times as measured, with their growth from B = 1 to 8, and at each alpha the best K's speedup."""
    batches, sizes = axes(found)
    seconds = {(p["batch"], p["size"]): p["seconds"] for p in found["points"]}
    lines = [
        "| B | plain step, ms | " + " | ".join(f"round, K = {size}" for size in sizes) + " |",
        "|---" * (len(sizes) + 2) + "|",
    ]
    for batch in batches:
        cells = [f"{found['plain'][str(batch)] * 1e3:.2f}"]
        cells += [f"{seconds[batch, size] * 1e3:.2f}" for size in sizes]
        lines.append(f"| {batch} | " + " | ".join(cells) + " |")
    if {1, 8} <= set(batches):
        growth = [found["plain"]["8"] / found["plain"]["1"], *(seconds[8, size] / seconds[1, size] for size in sizes)]
        lines.append("| 8 over 1 | " + " | ".join(f"{ratio:.2f}" for ratio in growth) + " |")
    lines += [
        "",
        "| B | " + " | ".join(f"alpha = {alpha:g}" for alpha in alphas) + " | pays above alpha of |",
        "|---" * (len(alphas) + 2) + "|",
    ]
    for batch in batches:
        cells = []
        for alpha in alphas:
            best = max(sizes, key=lambda size: speedup(found, batch, size, alpha))
            cells.append(f"{speedup(found, batch, best, alpha):.2f} (K = {best})")
        least = break_even(found, batch)
        lines.append(f"| {batch} | " + " | ".join(cells) + f" | {'none' if least is None else f'{least:.2f}'} |")
    return "\n".join(lines)
