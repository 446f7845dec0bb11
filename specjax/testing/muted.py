"""A drafter that can be silenced without compiling anew: what claim A of docs/exactness.md is tested by."""

import dataclasses
from typing import Any

import jax

from specjax.models.llama import Output
from specjax.models.lm import LM
from specjax.types import DecodeState, Draft, Drafter, Outcome, Request


@dataclasses.dataclass(frozen=True)
class Muted:
    """``inner``, or silence where ``speaks`` is False; both run the very same compiled programs.

    Silent, it makes plain decoding of the [B, K + 1] (of trees, [B, N + 1]) executable: one token a call.

    Args:
      inner: any drafter.
      speaks: bool[], traced.
    """

    inner: Drafter
    speaks: jax.Array

    def check(self, target: LM) -> None:
        self.inner.check(target)

    def widths(self, num_speculative_tokens: int) -> tuple[int, ...]:
        return self.inner.widths(num_speculative_tokens)[-1:]

    def taps(self, target: LM) -> tuple[int, ...]:
        return self.inner.taps(target)

    def init(self, target: LM, batch: int, capacity: int, num_speculative_tokens: int) -> Any:
        return self.inner.init(target, batch, capacity, num_speculative_tokens)

    def follow(self, target: LM, own: Any, request: Request, starts: jax.Array, out: Output) -> Any:
        return self.inner.follow(target, own, request, starts, out)

    def resume(self, target: LM, state: DecodeState) -> DecodeState:
        return self.inner.resume(target, state)

    def propose(
        self, target: LM, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, DecodeState]:
        draft, state = self.inner.propose(target, state, keys, num_speculative_tokens)
        return draft._replace(valid=draft.valid & self.speaks), state

    def commit(self, target: LM, state: DecodeState, outcome: Outcome | None) -> DecodeState:
        return self.inner.commit(target, state, outcome)


jax.tree_util.register_dataclass(Muted, data_fields=["inner", "speaks"], meta_fields=[])
