"""The record of a run: what was drafted and accepted, by request. Names and definitions follow vLLM and AIPerf.

A *step* is one target call that took part in a row's output. A *speculative step* verified at least one drafted
token. Tokens cut off by a stop or a limit count nowhere.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def own_origin(accepted: int, drafted: int) -> str:
    """The origin of the target's own token in a step that accepted so many of the drafted tokens."""
    return "plain" if not drafted else "bonus" if accepted == drafted else "correction"


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Of one request."""

    completion_tokens: int
    per_step_drafted: list[int]  # drafted tokens verified in each step; 0 is a plain step
    per_step_accepted: list[int]  # of those, accepted and kept
    num_speculative_tokens: int  # K, the most a step may draft

    @classmethod
    def from_record(
        cls, drafted: Iterable[int], accepted: Iterable[int], completion_tokens: int, num_speculative_tokens: int
    ) -> "Metrics":
        """From the counts of each round in order, cut where the row's ``completion_tokens`` are reached."""
        steps, left = [], completion_tokens
        for d, a in zip(drafted, accepted, strict=True):
            if left <= 0:
                break
            steps.append((int(d), min(int(a), left)))
            left -= int(a) + 1
        return cls(completion_tokens, [d for d, _ in steps], [a for _, a in steps], num_speculative_tokens)

    @property
    def num_steps(self) -> int:
        """Target calls."""
        return len(self.per_step_drafted)

    @property
    def num_spec_steps(self) -> int:
        """Target calls that verified at least one drafted token."""
        return sum(n > 0 for n in self.per_step_drafted)

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.per_step_drafted)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.per_step_accepted)

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted over verified drafted tokens; None without any."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def num_judged_tokens(self) -> int:
        """Drafted tokens that were accepted or refused; one after a refused token is verified, but never judged."""
        refused = sum(a < d for a, d in self._pairs())
        if self._missing() and self.per_step_accepted[-1] < self.per_step_drafted[-1]:
            refused -= 1  # the end cut that step short, not the target
        return self.num_accepted_tokens + refused

    @property
    def alpha(self) -> float | None:
        """Accepted over judged drafted tokens, Leviathan's acceptance rate; None without any."""
        return self.num_accepted_tokens / self.num_judged_tokens if self.num_judged_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted tokens a speculative step (the target's own token counts); None without any."""
        return 1 + self.num_accepted_tokens / self.num_spec_steps if self.num_spec_steps else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens kept a target call, plain steps included: what sets the speed."""
        return self.completion_tokens / self.num_steps if self.num_steps else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of speculative steps in which drafted token i was accepted, for i = 0..K-1."""
        steps = self.num_spec_steps
        accepted = np.array(self.per_step_accepted, int)
        return [float(np.sum(accepted > i) / steps) if steps else 0.0 for i in range(self.num_speculative_tokens)]

    @property
    def acceptance_histogram(self) -> list[int]:
        """How many steps accepted exactly 0..K drafted tokens."""
        return np.bincount(self.per_step_accepted, minlength=self.num_speculative_tokens + 1).tolist()

    def origins(self) -> list[str]:
        """Where each token comes from: "accepted" from the draft, or the target's own "correction" (after a rejected
        token), "bonus" (after a draft accepted whole) or "plain" token (of a step without a draft)."""
        found = []
        for accepted, drafted in self._pairs():
            found += ["accepted"] * accepted + [own_origin(accepted, drafted)]
        return found[: self.completion_tokens]

    def check(self) -> None:
        """Raises ValueError, naming the counts, unless they agree with each other."""
        if len(self.per_step_accepted) != len(self.per_step_drafted):
            raise ValueError(
                f"per_step_drafted has {len(self.per_step_drafted)} steps, per_step_accepted "
                f"{len(self.per_step_accepted)}"
            )
        for step, (accepted, drafted) in enumerate(self._pairs()):
            if not 0 <= accepted <= drafted <= self.num_speculative_tokens:
                raise ValueError(
                    f"step {step} accepted {accepted} of {drafted} drafted tokens, with at most "
                    f"{self.num_speculative_tokens} to draft"
                )
        # Each step adds its accepted tokens and one of the target's, which a stop or the limit may cut from the last.
        if self._missing() not in ((0, 1) if self.num_steps else (0,)):
            raise ValueError(
                f"completion_tokens is {self.completion_tokens}, but {self.num_steps} steps that accepted "
                f"{self.num_accepted_tokens} tokens give {self.num_accepted_tokens + self.num_steps}, or one less"
            )

    def _missing(self) -> int:
        return self.num_accepted_tokens + self.num_steps - self.completion_tokens

    def _pairs(self):
        return zip(self.per_step_accepted, self.per_step_drafted, strict=True)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict of all fields above."""
        names = [name for name, member in vars(Metrics).items() if isinstance(member, property)]
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Metrics":
        """What :meth:`to_dict` gave.

        Raises:
          ValueError: if a field is missing, or a derived figure does not follow from the steps.
        """
        fields = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in fields if name not in values]
        if missing:
            raise ValueError(f"metrics lack {', '.join(missing)}")
        metrics = cls(**{name: values[name] for name in fields})
        metrics.check()
        for name, value in metrics.to_dict().items():
            if name in values and values[name] != value:
                raise ValueError(f"{name} is {values[name]!r}, but the steps give {value!r}")
        return metrics


@dataclasses.dataclass(frozen=True)
class Totals:
    """Counts over several requests, and the rates of :class:`Metrics` that follow from them."""

    tokens: int  # new tokens
    steps: int  # target calls a row took part in
    spec_steps: int
    drafted: int
    accepted: int
    judged: int

    @classmethod
    def of(cls, metrics: Sequence[Metrics]) -> "Totals":
        return cls(
            sum(m.completion_tokens for m in metrics),
            sum(m.num_steps for m in metrics),
            sum(m.num_spec_steps for m in metrics),
            sum(m.num_draft_tokens for m in metrics),
            sum(m.num_accepted_tokens for m in metrics),
            sum(m.num_judged_tokens for m in metrics),
        )

    @property
    def draft_acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def alpha(self) -> float | None:
        return self.accepted / self.judged if self.judged else None

    @property
    def mean_acceptance_length(self) -> float | None:
        return 1 + self.accepted / self.spec_steps if self.spec_steps else None

    @property
    def tokens_per_step(self) -> float | None:
        return self.tokens / self.steps if self.steps else None
