"""What drafters without a state of their own share."""

import jax

from specjax.models.lm import LM
from specjax.types import DecodeState, Outcome


class Stateless:
    """``check``, ``init`` and ``commit`` of a drafter that reads everything it needs from the committed tokens."""

    def check(self, target: LM) -> None:
        del target

    def init(self, target: LM, batch: int, capacity: int, num_speculative_tokens: int) -> tuple:
        del target, batch, capacity, num_speculative_tokens
        return ()

    def commit(self, target: LM, state: DecodeState, outcome: Outcome | None) -> DecodeState:
        del target, outcome
        return state


def static(cls):
    """Registers a frozen dataclass without weights as a pytree with no leaves: its fields are static in jit."""
    return jax.tree_util.register_static(cls)
