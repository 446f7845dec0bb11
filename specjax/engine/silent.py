"""A drafter that proposes nothing, and still learns of every round: how an engine decodes plainly for a while."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decode.decoder import Decoder
from specjax.decode.types import DecodeState, Draft, Drafter, Plan
from specjax.drafting.base import Wrapping
from specjax.models.cache import KVCache
from specjax.models.model import Model


@dataclasses.dataclass(frozen=True)
class Silent(Wrapping):
    """Keeps the own state of ``inner`` up to date, so that ``inner`` can propose again in any later round."""

    inner: Drafter

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        return Plan((num_speculative_tokens + 1,), self.inner.plan(target, num_speculative_tokens).taps)

    def propose(
        self, target: Model, own: Any, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, Any, KVCache]:
        del target, keys
        shape = len(state.lengths), num_speculative_tokens
        return Draft(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), None), own, state.cache


jax.tree_util.register_dataclass(Silent, data_fields=["inner"], meta_fields=[])


def can_be_silent(decoder: Decoder) -> bool:
    """Whether the drafter can leave out rounds. It drafts chains, and learns from the answers to a chain alone."""
    plan, size = decoder.plan, decoder.num_speculative_tokens
    return size > 0 and not plan.trees and plan.block == size + 1


def silenced(decoder: Decoder) -> Decoder:
    """The decoder whose rounds are plain steps on the same state: one token a row, from a call of one token."""
    return dataclasses.replace(decoder, drafter=Silent(decoder.drafter), block_width=1)
