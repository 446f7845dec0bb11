"""What drafters share: chains of one width, and no state of their own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from specjax.models.llama import Output
from specjax.models.lm import LM
from specjax.types import DecodeState, Drafter, Outcome, Request


class Chain:
    """A drafter whose blocks have one width, and that need not be told what the target does."""

    def widths(self, num_speculative_tokens: int) -> tuple[int, ...]:
        return (num_speculative_tokens + 1,)

    def taps(self, target: LM) -> tuple[int, ...]:
        del target
        return ()

    def follow(self, target: LM, own: Any, request: Request, starts: jax.Array, out: Output) -> Any:
        del target, request, starts, out
        return own

    def resume(self, target: LM, state: DecodeState) -> DecodeState:
        del target
        return state


class Stateless(Chain):
    """What is left of the protocol for a drafter that reads everything it needs from the committed text: all but
    ``propose``."""

    def check(self, target: LM) -> None:
        del target

    def init(self, target: LM, batch: int, capacity: int, num_speculative_tokens: int) -> tuple:
        del target, batch, capacity, num_speculative_tokens
        return ()

    def commit(self, target: LM, state: DecodeState, outcome: Outcome | None) -> DecodeState:
        del target, outcome
        return state


class OftenSilent(Stateless):
    """One whose rounds without a draft cost a plain step."""

    def widths(self, num_speculative_tokens: int) -> tuple[int, ...]:
        return tuple(sorted({1, num_speculative_tokens + 1}))


def each(members: Sequence[Drafter], state: DecodeState, ask: Callable[[Any, DecodeState], DecodeState]) -> DecodeState:
    """The state after each member's turn, in which ``drafter`` is its own; theirs together are a tuple."""
    own = []
    for member, mine in zip(members, state.drafter, strict=True):
        state = ask(member, state._replace(drafter=mine))
        own.append(state.drafter)
    return state._replace(drafter=tuple(own))


def gives_probs(drafter: Any) -> bool:
    """Whether a drafter has probabilities of its own, by which a policy can judge how sure it is."""
    return getattr(drafter, "gives_probs", True)


def static(cls):
    """Registers a frozen dataclass without weights as a pytree with no leaves: its fields are static in jit."""
    return jax.tree_util.register_static(cls)
