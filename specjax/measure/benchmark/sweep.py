"""Times rounds for every batch size B and draft length K. From these times follows the speedup at any acceptance rate.

The shapes of a round depend on B and K, and not on the accepted tokens. Its time therefore depends on B and K alone, so
each (B, K) is timed once. The speedup at any alpha then follows from theorem 3.8 (Leviathan et al. 2023):

    speedup = expected tokens of a round * time of a plain step at the same B / time of a round

The tokens of a round are measured too, to check the expectation.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from specjax.decode.types import Drafter
from specjax.drafters import DraftModel
from specjax.drafting import theory
from specjax.generation import requests
from specjax.measure.benchmark.case import Case
from specjax.measure.benchmark.drafting import Drafting
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
    """Times rounds for every B and K and each of the case's drafters.

    Adds a row for each to the table, and a section for each drafter: ``sweep``, or with the drafter's name after it.

    Args:
      case: the models and the request.
      table: the table that the figures go to.
      batches: every B to time.
      sizes: every K to time, each at least 1.
      check_alphas: further acceptance rates of the draft model at which the tokens of a round are measured, at the
        largest batch.
      rounds: the number of rounds that are timed together.
    """
    block = max(way.drafter(size).plan(case.target, size).block for way in case.drafts for size in sizes)
    capacity = requests.bucket(case.given_length + (rounds + 1) * (max(sizes) + 1) + block, 128)

    def steady(batch: int, size: int, drafter: Drafter | None) -> Steady:
        return Steady.of(case.target, case.prompts(batch), drafter, size, rounds, capacity)

    points_in_all = len(batches) * (1 + len(case.drafts) * len(sizes)) + len(check_alphas) * len(sizes)
    line = bar(desc="sweep", total=points_in_all, unit="point")
    common = {"rounds": rounds, "capacity": capacity}
    found: dict[str, dict[str, Any]] = {
        way.name: {**common, "plain": {}, "points": [], "checks": []} for way in case.drafts
    }
    for batch in batches:
        points = {(way, size): steady(batch, size, way.drafter(size)) for way in case.drafts for size in sizes}
        _time_batch(case, table, batch, steady(batch, 0, None), points, found, line)
    for alpha in check_alphas:
        guess = partly_right(case.successor, alpha, case.seed + 1)
        draft = case.drafting(planted_lm(case.draft.config, guess, 2 * case.seed + 1, case.draft.dtype))
        (checked,) = found.values()
        for size in sizes:
            batch, expected = max(batches), theory.expected_tokens(alpha, size)
            tokens = steady(batch, size, DraftModel(draft)).measure(repeats=1)[1]
            _check(checked, batch, size, alpha, tokens, expected)
            say(f"alpha = {alpha}, B = {batch}, K = {size}: {tokens:.2f} tokens a round, expected {expected:.2f}")
            line.update()
    line.close()
    table.save()


def _time_batch(
    case: Case,
    table: Table,
    batch: int,
    plain: Steady,
    points: dict[tuple[Drafting, int], Steady],
    found: dict[str, dict[str, Any]],
    line,
) -> None:
    """Times one batch: a plain step, then a round of each drafter and size.

    Adds the figures to ``table`` and ``found``, and moves the progress bar ``line``.
    """
    side_by_side([plain.compile_prefill, plain.compile, *(point.compile for point in points.values())])
    step, _ = plain.measure()
    line.update()
    table.add(f"sweep, B = {batch}, plain step", step, case.step_floor)
    for own in found.values():
        own["plain"][str(batch)] = step
    for (way, size), point in points.items():
        seconds, tokens = point.measure()
        line.update()
        own, expected = found[way.name], way.expected(size)
        own["points"].append({"batch": batch, "size": size, "seconds": seconds})
        # A run that is cut short leaves its points: they can be drawn already.
        table.sections["sweep" if way.name == case.drafts[0].name else f"sweep, {way.name}"] = own
        _check(own, batch, size, case.alpha, tokens, expected)
        table.add(
            ", ".join(filter(None, ("sweep", way.name, f"B = {batch}", f"K = {size}", "round"))),
            seconds,
            way.floor(size, case.speed) + case.step_floor,
            f"{tokens:.2f} tokens a row, expected {expected:.2f}; {tokens * step / seconds:.2f} x plain, "
            f"{expected * step / seconds:.2f} at the expected tokens",
        )


def _check(found: dict[str, Any], batch: int, size: int, alpha: float, tokens: float, expected: float) -> None:
    """Adds a check of the measured tokens of a round."""
    found["checks"].append({"batch": batch, "size": size, "alpha": alpha, "tokens": tokens, "expected": expected})


def speedup(found: dict[str, Any], batch: int, size: int, alpha: float) -> float:
    """The speedup over plain decoding at the same batch size, by theorem 3.8.

    Args:
      found: the section that :func:`sweep` wrote.
      batch: B.
      size: K.
      alpha: the acceptance rate, from 0 to 1.
    """
    seconds = next(p["seconds"] for p in found["points"] if (p["batch"], p["size"]) == (batch, size))
    return theory.expected_tokens(alpha, size) * found["plain"][str(batch)] / seconds


def break_even(found: dict[str, Any], batch: int) -> float | None:
    """The lowest acceptance rate, to a thousandth, at which some K is faster than plain decoding. None: there is none.

    Args:
      found: the section that :func:`sweep` wrote.
      batch: B.
    """
    sizes = axes(found)[1]
    pays = (i / 1000 for i in range(1001) if any(speedup(found, batch, size, i / 1000) > 1 for size in sizes))
    return next(pays, None)


def axes(found: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The batches that were timed at every size, and the sizes; both rising.

    A batch whose timing was cut short is left out.
    """
    sizes = {p["size"] for p in found["points"]}
    counts = Counter(p["batch"] for p in found["points"])
    return sorted(batch for batch in counts if counts[batch] == len(sizes)), sorted(sizes)


def markdown(found: dict[str, Any], alphas: Sequence[float]) -> str:
    """Two tables in Markdown.

    The first table has the measured times, and their growth from B = 1 to B = 8. The second table has, for each alpha,
    the speedup of the best K.
    """
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
