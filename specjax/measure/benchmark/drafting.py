"""A way to draft that a benchmark measures: the drafter, what its steps read, and the tokens to expect of a round."""

import dataclasses
from collections.abc import Callable
from functools import partial

from specjax.decode.types import Drafter
from specjax.drafters import DraftModel
from specjax.drafting import theory
from specjax.measure.benchmark.timed import weight_bytes
from specjax.models.lm import LM


@dataclasses.dataclass(frozen=True)
class Drafting:
    """One drafter of a benchmark."""

    # What rows are named by: empty for the draft model, and for a head "chain" or the tree.
    name: str
    # The drafter for K drafted tokens or levels.
    drafter: Callable[[int], Drafter]
    # The bytes of weights that a draft step reads. A tree makes one step a level.
    step_bytes: int
    # The bytes of weights that the drafter reads once a round, beside its steps.
    round_bytes: int
    # The expected tokens of a round of K drafted tokens or levels.
    expected: Callable[[int], float]
    # Whether the drafter needs a node's second guess. Top-p and top-k would leave only the best guess of a planted
    # head, so such a drafter is measured without them.
    siblings: bool = False

    def floor(self, size: int, speed: dict[str, float]) -> float:
        """Seconds to read the drafter's weights in a round of K = ``size``."""
        return (size * self.step_bytes + self.round_bytes) / speed["read"]


def by_model(draft: LM, alpha: float) -> Drafting:
    """Drafting with a planted draft model of acceptance rate ``alpha``."""
    expected = partial(theory.expected_tokens, alpha)
    return Drafting("", lambda size: DraftModel(draft), weight_bytes(draft), 0, expected)
