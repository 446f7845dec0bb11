"""The figures behind the report: what was accepted where, and the measured speedup taken apart.

Rows of a batch share their rounds, so a batch's time goes by its longest row, as plain decoding's does.
"""

import dataclasses
from itertools import zip_longest
from typing import Any

from specjax.drafting import theory
from specjax.generation.metrics import Metrics, Totals


def all_metrics(record: dict) -> list[Metrics]:
    return [Metrics.from_dict(completion["metrics"]) for completion in record["completions"]]


def totals(record: dict) -> Totals:
    return Totals.of(all_metrics(record))


def positions(record: dict) -> list[tuple[int, int]]:
    """For each position in the draft, how many tokens there were judged (all before them accepted) and accepted."""
    found = [[0, 0] for _ in range(record["settings"]["num_speculative_tokens"])]
    for metrics in all_metrics(record):
        refused = metrics.num_judged_tokens - metrics.num_accepted_tokens
        for accepted, drafted in zip(metrics.per_step_accepted, metrics.per_step_drafted, strict=True):
            for i in range(accepted):
                found[i][0] += 1
                found[i][1] += 1
            if accepted < drafted and refused:  # a last step that the end cut short refused nothing
                found[accepted][0] += 1
                refused -= 1
    return [(judged, accepted) for judged, accepted in found]


def histogram(record: dict) -> tuple[int, list[int]]:
    """Plain steps, and how many speculative steps accepted exactly 0..K drafted tokens."""
    plain, counts = 0, [0] * (record["settings"]["num_speculative_tokens"] + 1)
    for metrics in all_metrics(record):
        for accepted, drafted in zip(metrics.per_step_accepted, metrics.per_step_drafted, strict=True):
            if drafted:
                counts[accepted] += 1
            else:
                plain += 1
    return plain, counts


def widths(record: dict) -> list[int]:
    """The width of each round's verified block in tokens, of those that were timed."""
    timed = sorted(map(int, record["timing"]["calls"]["verify"]))
    rows = [completion["metrics"]["per_step_drafted"] for completion in record["completions"]]
    found = []
    for i in range(max(map(len, rows), default=0)):
        needed = 1 + max(row[i] for row in rows if i < len(row))
        found.append(next(width for width in timed if width >= needed))
    return found


@dataclasses.dataclass(frozen=True)
class Speedup:
    """The measured speedup over plain decoding, the predicted one, and what lies between.

    Seconds of decoding are ``rounds * plain_step + drafting + widening + rest``: one plain step a round, what drafting
    adds, what verifying more than one token adds, and whatever else (the host, noise; it may be negative).
    """

    plain_step: float  # seconds
    steps: int  # plain steps that the longest row would take: its tokens
    rounds: int
    drafted_rounds: int  # of them, with a draft
    seconds: float  # of decoding, measured
    drafting: float
    widening: float
    side_by_side: float | None  # times plain decoding, as --compare measured it
    alpha: float | None
    cost: float | None  # c: a draft step over a plain step
    size: int  # K

    @property
    def rest(self) -> float:
        return self.seconds - self.rounds * self.plain_step - self.drafting - self.widening

    @property
    def measured(self) -> float:
        return self.side_by_side or self.steps * self.plain_step / self.seconds

    @property
    def predicted(self) -> float | None:
        """Leviathan's theorem 3.8 at the measured alpha and c."""
        if self.alpha is None or self.cost is None:
            return None
        return float(theory.walltime_factor(self.alpha, self.size, self.cost))

    def ladder(self) -> list[tuple[str, float, str]]:
        """From the prediction to the measurement: name, times plain decoding, and what this rung takes into account."""
        if self.predicted is None:
            return [("measured", self.measured, self.measured_how)]
        alpha, cost, size = self.alpha, self.cost, self.size
        expected = float(theory.expected_tokens(alpha, size))
        covered = 1 + self.drafted_rounds / self.rounds * (expected - 1)
        kept = self.steps / self.rounds
        plain = self.steps * self.plain_step
        return [
            (
                "tokens a round, equation 1",
                expected,
                f"were drafts free and a block's verification a plain step: alpha = {alpha:.3f}, K = {size}",
            ),
            (
                "theorem 3.8",
                self.predicted,
                f"with drafting at its measured cost, c = {cost:.4f} plain steps a drafted token",
            ),
            (
                "rounds without a draft",
                covered / (1 + self.drafting / self.rounds / self.plain_step),
                f"{self.drafted_rounds} of {self.rounds} rounds had a draft; the others are plain steps",
            ),
            (
                "tokens a round as they were",
                plain / (self.rounds * self.plain_step + self.drafting),
                f"{kept:.2f} were kept a round, not {covered:.2f}: acceptance is neither equal nor independent from "
                "token to token, and a draft may be shorter than K",
            ),
            (
                "verification as wide as it was",
                plain / (self.rounds * self.plain_step + self.drafting + self.widening),
                f"a round's verification took {1 + self.widening / self.rounds / self.plain_step:.2f} plain steps",
            ),
            ("measured", self.measured, f"{self.measured_how}; the rest of the time: {self.rest_in_words()}"),
        ]

    def rest_in_words(self) -> str:
        share = self.rest / self.seconds
        if share < 0:
            return f"none, the rounds took {-share:.0%} less than their parts timed alone, which is noise"
        return f"{share:.0%}, the host between rounds, and noise"

    @property
    def measured_how(self) -> str:
        if self.side_by_side:
            return "against plain decoding of the same prompts in the same process"
        return f"against {self.steps} plain steps of {self.plain_step * 1e3:.3g} ms, timed in the same process"


def speedup(record: dict) -> Speedup | None:
    """None if neither ``--profile`` nor ``--compare`` left anything to compare with, or nothing was generated."""
    timing: dict[str, Any] = record["timing"]
    metrics, calls, plain = all_metrics(record), timing.get("calls"), timing.get("plain") or {}
    steps = max((m.completion_tokens for m in metrics), default=0)
    rounds = max((m.num_steps for m in metrics), default=0)
    size = record["settings"]["num_speculative_tokens"]
    if not rounds or not timing["decode"] or not (calls or plain):
        return None
    plain_step = calls["plain_step"] if calls else plain["decode"] / steps
    return Speedup(
        plain_step=plain_step,
        steps=steps,
        rounds=rounds,
        drafted_rounds=sum(any(drafts) for drafts in zip_longest(*(m.per_step_drafted for m in metrics))),
        seconds=timing["decode"],
        drafting=rounds * calls["draft"] if calls else 0.0,
        widening=sum(calls["verify"][str(width)] - plain_step for width in widths(record)) if calls else 0.0,
        side_by_side=timing.get("ratio"),
        alpha=totals(record).alpha,
        cost=calls["draft"] / size / plain_step if calls and size else None,
        size=size,
    )


def in_words(record: dict) -> list[str]:
    """Why it was fast or slow, a sentence each."""
    found, speed = totals(record), speedup(record)
    if not found.tokens:
        return ["Nothing was generated."]
    sentences = []
    if speed:
        sentences.append(f"{speed.measured:.2f} times the speed of plain decoding, {speed.measured_how}.")
    sentences.append(
        f"A target call kept {found.tokens / found.steps:.2f} tokens on average: {found.tokens} tokens took "
        f"{found.steps} calls."
    )
    if not found.drafted:
        return [*sentences, "Nothing was drafted: every call was a plain step."]
    sentences.append(
        f"{found.spec_steps} of the {found.steps} calls had a draft to verify, and {found.accepted} of {found.drafted} "
        f"drafted tokens were accepted. A drafted token whose predecessors were accepted was accepted itself in "
        f"{found.alpha:.0%} of cases."
    )
    if not (speed and record["timing"].get("calls")):
        return [*sentences, "Run generate.py with --profile to see where the time went."]
    costs = {
        "drafting": speed.drafting,
        "verifying more than one token a call": speed.widening,
        "the host between rounds, and noise": speed.rest,
    }
    worst = max(costs, key=lambda name: costs[name])
    sentences.append(
        f"Beside one plain step a round, most time went to {worst}: {costs[worst] / speed.seconds:.0%} of all."
    )
    if record["timing"]["streamed"] and speed.rest > 0.1 * speed.seconds:
        sentences.append("The run was streamed; with --no-stream the host stays out of it, and no q and p are kept.")
    return sentences
