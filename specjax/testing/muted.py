"""A drafter that can be silenced without another compilation. Claim A of docs/exactness.md is tested with it."""

import dataclasses
from typing import Any

import jax

from specjax.decode.types import DecodeState, Draft, Drafter, Plan
from specjax.drafting.base import Wrapping
from specjax.models.cache import KVCache
from specjax.models.model import Model


@dataclasses.dataclass(frozen=True)
class Muted(Wrapping):
    """Proposes the draft of ``inner`` if ``speaks``, else nothing. The same compiled programs run in both cases.

    If the drafter is silent, the program for blocks [B, K + 1] (for trees [B, N + 1]) decodes plainly: each call
    commits one token.

    Args:
      inner: any drafter.
      speaks: bool[], a traced value.
    """

    inner: Drafter
    speaks: jax.Array

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        plan = self.inner.plan(target, num_speculative_tokens)
        return plan._replace(widths=plan.widths[-1:])

    def propose(
        self, target: Model, own: Any, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, Any, KVCache]:
        draft, own, cache = self.inner.propose(target, own, state, keys, num_speculative_tokens)
        return draft._replace(valid=draft.valid & self.speaks), own, cache


jax.tree_util.register_dataclass(Muted, data_fields=["inner", "speaks"], meta_fields=[])
