"""A draft measured for theorem 3.8: alpha, its costs, and the speed of a run (Leviathan et al. 2023, tables 2 to 4)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from specjax.generation.generate import prepare
from specjax.generation.metrics import Totals
from specjax.measure import acceptance, timing
from specjax.models.lm import LM

_COUNT = 16  # repetitions in a timed program: steps of small models are short beside the host's call


@dataclasses.dataclass(frozen=True)
class Trial:
    """A target with one drafter, and the prompts on which both are measured.

    Args:
      target: the target.
      drafter: a drafter of chains.
      prompts: the token ids or the text of each prompt.
      size: K, the drafted tokens of a round.
      max_new_tokens: new tokens of each prompt.
      capacity: entries of the cache, enough for every prompt. All runs then share one program.
    """

    target: LM
    drafter: Any
    prompts: Sequence[Any]
    size: int
    max_new_tokens: int
    capacity: int

    def job(self, prompt: Any, temperature: float, seed: int = 0) -> Any:
        """The request of one prompt."""
        return prepare(
            self.target, [prompt], drafter=self.drafter, num_speculative_tokens=self.size, temperature=temperature,
            max_new_tokens=self.max_new_tokens, capacity=self.capacity, seed=seed,
        )  # fmt: skip

    def warmup(self) -> None:
        """Compiles all that is timed. Several trials may be warmed up at once, each in a thread."""
        job = self.job(self.prompts[0], 1.0)
        job.warmup()
        timing.calls(job, _COUNT, repeats=1)

    def alpha(self, temperature: float) -> tuple[acceptance.Alpha, float]:
        """Alpha by corollary 3.6 over all prompts in one batch, and the share of prefixes with a draft."""
        samples = acceptance.measure(
            self.target, self.prompts, self.drafter, 1, self.max_new_tokens, temperature=temperature
        )
        return acceptance.alpha(samples), acceptance.coverage(samples)

    def costs(self) -> tuple[float, float]:
        """c, the time of a draft step, and the time of verifying K drafted tokens, both over that of a plain step."""
        seconds = timing.calls(self.job(self.prompts[0], 1.0), _COUNT)
        plain, verify = seconds["plain_step"], [*seconds["verify"].values()][-1]  # widths rise
        return seconds["draft"] / self.size / plain, verify / plain

    def speed(self, temperature: float) -> tuple[float, float]:
        """Tokens a second and tokens a round, over all prompts, one at a time. Prefill is not counted."""
        jobs = [self.job(prompt, temperature, seed) for seed, prompt in enumerate(self.prompts)]
        runs = [job.generate() for job in jobs]
        totals = Totals.of([run.metrics[0] for run in runs])
        assert totals.tokens_per_step is not None
        return totals.tokens / sum(run.seconds["decode"] for run in runs), totals.tokens_per_step
