"""How many tokens were drafted and accepted, for each request. Names and definitions follow vLLM and AIPerf.

A *step* of a row is one target call that contributed to the row's output. A *speculative step* verified at least one
drafted token. A *plain step* verified none. Tokens that a stop or a limit cuts off are not counted.

A drafted token is *verified* if the target ran on it. It is *judged* if it was accepted or refused. In a chain, the
tokens after a refused token are verified but not judged.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def own_origin(accepted: int, drafted: int) -> str:
    """The origin of the target's own token in a step that accepted ``accepted`` of ``drafted`` tokens."""
    return "plain" if not drafted else "bonus" if accepted == drafted else "correction"


@dataclasses.dataclass(frozen=True)
class Metrics:
    """The counts of one request, and the rates that follow from them."""

    # The number of new tokens.
    completion_tokens: int
    # The number of drafted tokens that each step verified. 0 is a plain step.
    per_step_drafted: list[int]
    # The number of these tokens that were accepted and kept.
    per_step_accepted: list[int]
    # K, the largest number of drafted tokens that a step can accept.
    num_speculative_tokens: int

    @classmethod
    def from_record(
        cls, drafted: Iterable[int], accepted: Iterable[int], completion_tokens: int, num_speculative_tokens: int
    ) -> "Metrics":
        """The metrics of a row, from the counts of its rounds in order.

        Rounds after the row's last token are left out, and accepted tokens after the last token are not counted.

        Args:
          drafted: the number of drafted tokens that each round verified.
          accepted: the number of drafted tokens that each round accepted.
          completion_tokens: the number of new tokens of the row.
          num_speculative_tokens: K.
        """
        steps, left = [], completion_tokens
        for d, a in zip(drafted, accepted, strict=True):
            if left <= 0:
                break
            steps.append((int(d), min(int(a), left)))
            left -= int(a) + 1
        return cls(completion_tokens, [d for d, _ in steps], [a for _, a in steps], num_speculative_tokens)

    @property
    def num_steps(self) -> int:
        """The number of target calls."""
        return len(self.per_step_drafted)

    @property
    def num_spec_steps(self) -> int:
        """The number of target calls that verified at least one drafted token."""
        return sum(n > 0 for n in self.per_step_drafted)

    @property
    def num_draft_tokens(self) -> int:
        """The number of drafted tokens that were verified."""
        return sum(self.per_step_drafted)

    @property
    def num_accepted_tokens(self) -> int:
        """The number of drafted tokens that were accepted and kept."""
        return sum(self.per_step_accepted)

    @property
    def draft_acceptance_rate(self) -> float | None:
        """The number of accepted tokens over the number of verified ones. None if no token was verified."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def num_judged_tokens(self) -> int:
        """The number of drafted tokens that were accepted or refused. Tokens after a refused one are not judged."""
        refused = sum(a < d for a, d in self._pairs())
        if self._missing() and self.per_step_accepted[-1] < self.per_step_drafted[-1]:
            refused -= 1  # the end of the row cut the last step short: the target refused nothing there
        return self.num_accepted_tokens + refused

    @property
    def alpha(self) -> float | None:
        """The number of accepted tokens over the number of judged ones, Leviathan's acceptance rate. None if no token
        was judged."""
        return self.num_accepted_tokens / self.num_judged_tokens if self.num_judged_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + the mean number of accepted tokens of a speculative step; the 1 is the target's own token. None if no
        step was speculative."""
        return 1 + self.num_accepted_tokens / self.num_spec_steps if self.num_spec_steps else None

    @property
    def tokens_per_step(self) -> float | None:
        """The mean number of new tokens of a target call, plain steps included. This number sets the speed."""
        return self.completion_tokens / self.num_steps if self.num_steps else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """For i = 0..K-1, the share of speculative steps in which drafted token i was accepted."""
        steps = self.num_spec_steps
        accepted = np.array(self.per_step_accepted, int)
        return [float(np.sum(accepted > i) / steps) if steps else 0.0 for i in range(self.num_speculative_tokens)]

    @property
    def acceptance_histogram(self) -> list[int]:
        """For n = 0..K, the number of steps that accepted exactly n drafted tokens."""
        return np.bincount(self.per_step_accepted, minlength=self.num_speculative_tokens + 1).tolist()

    def origins(self) -> list[str]:
        """Where each new token comes from.

        "accepted": the token was drafted and accepted. All other tokens are the target's own. "correction": the token
        stands in place of a refused one. "bonus": the token follows a draft that was accepted whole. "plain": the step
        had no draft.
        """
        found = []
        for accepted, drafted in self._pairs():
            found += ["accepted"] * accepted + [own_origin(accepted, drafted)]
        return found[: self.completion_tokens]

    def check(self) -> None:
        """Raises ValueError, which names the counts, unless the counts agree with each other."""
        if len(self.per_step_accepted) != len(self.per_step_drafted):
            raise ValueError(
                f"per_step_drafted has {len(self.per_step_drafted)} steps, but per_step_accepted has "
                f"{len(self.per_step_accepted)}"
            )
        for step, (accepted, drafted) in enumerate(self._pairs()):
            if not 0 <= accepted <= drafted <= self.num_speculative_tokens:
                raise ValueError(
                    f"step {step} accepted {accepted} of {drafted} drafted tokens, expected 0 <= accepted <= drafted "
                    f"<= {self.num_speculative_tokens}"
                )
        # Each step adds its accepted tokens and the target's own token. In the last step a stop or the limit may cut
        # off the target's own token.
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
        """All fields and properties above, as a dict that JSON can hold."""
        names = [name for name, member in vars(Metrics).items() if isinstance(member, property)]
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Metrics":
        """The metrics of which :meth:`to_dict` made this dict.

        Raises:
          ValueError: a field is missing, the counts contradict each other, or a property has another value than the
            counts give.
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

    # The number of new tokens.
    tokens: int
    # The number of target calls, counted once for each row that took part in the call.
    steps: int
    # The number of these that verified at least one drafted token of the row.
    spec_steps: int
    # The number of drafted tokens that were verified.
    drafted: int
    # The number of drafted tokens that were accepted and kept.
    accepted: int
    # The number of drafted tokens that were accepted or refused.
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
