"""The figures of the report: how many tokens were accepted at each position, and the parts of the measured speedup.

The rows of a batch share their rounds, so the longest row sets the time of a batch. The same holds for plain decoding.
"""

import dataclasses
from itertools import zip_longest
from typing import Any

from specjax.drafting import theory
from specjax.generation.metrics import Metrics, Totals


def all_metrics(record: dict) -> list[Metrics]:
    """The metrics of each completion."""
    return [Metrics.from_dict(completion["metrics"]) for completion in record["completions"]]


def totals(record: dict) -> Totals:
    """The counts of all completions together."""
    return Totals.of(all_metrics(record))


def positions(record: dict) -> list[tuple[int, int]]:
    """For each position in the draft, the number of judged tokens and the number of accepted tokens there.

    A token is judged if all tokens before it in the draft were accepted.
    """
    found = [[0, 0] for _ in range(record["settings"]["num_speculative_tokens"])]
    for metrics in all_metrics(record):
        refused = metrics.num_judged_tokens - metrics.num_accepted_tokens
        for accepted, drafted in zip(metrics.per_step_accepted, metrics.per_step_drafted, strict=True):
            for i in range(accepted):
                found[i][0] += 1
                found[i][1] += 1
            if accepted < drafted and refused:  # if the end cut the last step short, the step refused nothing
                found[accepted][0] += 1
                refused -= 1
    return [(judged, accepted) for judged, accepted in found]


def histogram(record: dict) -> tuple[int, list[int]]:
    """The number of plain steps; and for n = 0..K, the number of speculative steps that accepted exactly n tokens."""
    plain, counts = 0, [0] * (record["settings"]["num_speculative_tokens"] + 1)
    for metrics in all_metrics(record):
        for accepted, drafted in zip(metrics.per_step_accepted, metrics.per_step_drafted, strict=True):
            if drafted:
                counts[accepted] += 1
            else:
                plain += 1
    return plain, counts


def widths(record: dict) -> list[int]:
    """The width of each round's verified block in tokens: the smallest timed width that holds every row's draft."""
    timed = sorted(map(int, record["timing"]["calls"]["verify"]))
    rows = [completion["metrics"]["per_step_drafted"] for completion in record["completions"]]
    found = []
    for i in range(max(map(len, rows), default=0)):
        needed = 1 + max(row[i] for row in rows if i < len(row))
        found.append(next(width for width in timed if width >= needed))
    return found


@dataclasses.dataclass(frozen=True)
class Speedup:
    """The measured speedup over plain decoding, the predicted speedup, and the steps from one to the other.

    The seconds of decoding are the sum of four parts::

        seconds = rounds * plain_step + drafting + widening + rest

    ``rest`` is the time of the host between rounds, and noise. It may be negative.
    """

    # The seconds of a plain step.
    plain_step: float
    # The number of plain steps that the longest row would take. This is the number of its new tokens.
    steps: int
    # The number of rounds.
    rounds: int
    # The number of rounds that had a draft.
    drafted_rounds: int
    # The measured seconds of decoding.
    seconds: float
    # The seconds of drafting in all rounds.
    drafting: float
    # The seconds that verifying blocks took in all rounds, beyond a plain step for each round.
    widening: float
    # The speedup over plain decoding that --compare measured. None: not measured.
    side_by_side: float | None
    # The acceptance rate. None: nothing was judged.
    alpha: float | None
    # c, the time of a draft step over the time of a plain step. None: not timed.
    cost: float | None
    # K.
    size: int

    @property
    def rest(self) -> float:
        """The seconds of decoding that no timed part explains: the host between rounds, and noise."""
        return self.seconds - self.rounds * self.plain_step - self.drafting - self.widening

    @property
    def measured(self) -> float:
        """The measured speedup over plain decoding."""
        return self.side_by_side or self.steps * self.plain_step / self.seconds

    @property
    def predicted(self) -> float | None:
        """The speedup of theorem 3.8 (Leviathan et al. 2023) at the measured alpha and c."""
        if self.alpha is None or self.cost is None:
            return None
        return float(theory.walltime_factor(self.alpha, self.size, self.cost))

    def ladder(self) -> list[tuple[str, float, str]]:
        """From the prediction to the measurement, in steps of which each takes one more thing into account.

        -> for each step its name, the speedup over plain decoding, and the reason in words.
        """
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
                f"if drafts were free and verifying a block took a plain step: alpha = {alpha:.3f}, K = {size}",
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
                f"a round kept {kept:.2f} tokens, not {covered:.2f}: acceptance differs from token to token and is not "
                "independent, and a draft may be shorter than K",
            ),
            (
                "verification as wide as it was",
                plain / (self.rounds * self.plain_step + self.drafting + self.widening),
                f"a round's verification took {1 + self.widening / self.rounds / self.plain_step:.2f} plain steps",
            ),
            ("measured", self.measured, f"{self.measured_how}; the rest of the time: {self.rest_in_words()}"),
        ]

    def rest_in_words(self) -> str:
        """The share of the rest in the seconds of decoding, and its cause."""
        share = self.rest / self.seconds
        if share < 0:
            return f"none; the rounds took {-share:.0%} less time than their parts timed alone, which is noise"
        return f"{share:.0%}, which is the host between rounds, and noise"

    @property
    def measured_how(self) -> str:
        """How the measured speedup was found."""
        if self.side_by_side:
            return "against plain decoding of the same prompts in the same process"
        return f"against {self.steps} plain steps of {self.plain_step * 1e3:.3g} ms, timed in the same process"


def speedup(record: dict) -> Speedup | None:
    """The speedup of a run. None if the record has no times of plain decoding, or if nothing was generated.

    The times of plain decoding come from the flags ``--profile`` and ``--compare``.
    """
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
    """Sentences that say how fast the run was, and why."""
    found, speed = totals(record), speedup(record)
    if not found.tokens:
        return ["Nothing was generated."]
    sentences = []
    if speed:
        sentences.append(f"{speed.measured:.2f} times the speed of plain decoding, {speed.measured_how}.")
    sentences.append(
        f"A target call gave {found.tokens / found.steps:.2f} tokens on average: {found.tokens} tokens took "
        f"{found.steps} calls."
    )
    if not found.drafted:
        return [*sentences, "Nothing was drafted: every call was a plain step."]
    sentences.append(
        f"{found.spec_steps} of the {found.steps} calls had a draft to verify, and {found.accepted} of {found.drafted} "
        f"drafted tokens were accepted. If all drafted tokens before a drafted token were accepted, that token was "
        f"accepted too in {found.alpha:.0%} of cases."
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
        f"Apart from one plain step in each round, most of the time went to {worst}: "
        f"{costs[worst] / speed.seconds:.0%} of the decoding time."
    )
    if record["timing"]["streamed"] and speed.rest > 0.1 * speed.seconds:
        sentences.append(
            "The run was streamed. With --no-stream the host does nothing between rounds, but the record then has no q "
            "and p."
        )
    return sentences
