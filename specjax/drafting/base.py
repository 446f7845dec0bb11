"""Base classes of drafters: of one block width, without an own state, often silent, around another, of several."""

from typing import Any

import jax

from specjax.decode.types import DecodeState, Drafter, Outcome, Plan
from specjax.models.model import Model, Output


class FixedWidth:
    """A drafter of chains with one block width, which learns nothing from ``follow`` and ``resume``."""

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        del target
        return Plan((num_speculative_tokens + 1,))

    def follow(self, target: Model, own: Any, state: DecodeState, starts: jax.Array, out: Output) -> Any:
        del target, state, starts, out
        return own

    def resume(self, target: Model, own: Any, state: DecodeState) -> Any:
        del target, state
        return own


class Stateless(FixedWidth):
    """A drafter without an own state: it drafts from the round's state alone. A subclass only needs ``propose``."""

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> tuple:
        del target, batch, capacity, num_speculative_tokens
        return ()

    def commit(self, target: Model, own: Any, state: DecodeState, outcome: Outcome | None) -> Any:
        del target, state, outcome
        return own


class OftenSilent(Stateless):
    """A stateless drafter that often proposes nothing. A round in which no row has a draft costs one plain step."""

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        del target
        return Plan(tuple(sorted({1, num_speculative_tokens + 1})))


class Wrapping:
    """A drafter around another one, ``inner``, whose own state it has. A subclass adds ``plan`` and ``propose``."""

    inner: Drafter

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> Any:
        return self.inner.init(target, batch, capacity, num_speculative_tokens)

    def follow(self, target: Model, own: Any, state: DecodeState, starts: jax.Array, out: Output) -> Any:
        return self.inner.follow(target, own, state, starts, out)

    def resume(self, target: Model, own: Any, state: DecodeState) -> Any:
        return self.inner.resume(target, own, state)

    def commit(self, target: Model, own: Any, state: DecodeState, outcome: Outcome | None) -> Any:
        return self.inner.commit(target, own, state, outcome)


class Several:
    """A drafter of several others, ``members``, whose own states are a tuple.

    A subclass adds ``plan`` and ``propose``.
    """

    members: Any  # tuple[Drafter, ...]; a subclass may compute it

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> tuple:
        return tuple(m.init(target, batch, capacity, num_speculative_tokens) for m in self.members)

    def follow(self, target: Model, own: tuple, state: DecodeState, starts: jax.Array, out: Output) -> tuple:
        return tuple(m.follow(target, s, state, starts, out) for m, s in zip(self.members, own, strict=True))

    def resume(self, target: Model, own: tuple, state: DecodeState) -> tuple:
        return tuple(m.resume(target, s, state) for m, s in zip(self.members, own, strict=True))

    def commit(self, target: Model, own: tuple, state: DecodeState, outcome: Outcome | None) -> tuple:
        return tuple(m.commit(target, s, state, outcome) for m, s in zip(self.members, own, strict=True))


def static(cls):
    """Registers a frozen dataclass without weights as a pytree without leaves, so that its fields are static in jit."""
    return jax.tree_util.register_static(cls)
