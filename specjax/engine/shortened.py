"""A drafter that proposes fewer tokens for a while, or none, and still learns of every round."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decode.decoder import Decoder
from specjax.decode.types import DecodeState, Draft, Drafter, Plan
from specjax.drafting.base import Wrapping
from specjax.drafting.combine import widened
from specjax.models.cache import KVCache
from specjax.models.model import Model


@dataclasses.dataclass(frozen=True)
class Shortened(Wrapping):
    """Proposes the chain that ``inner`` proposes for a K of ``most`` tokens, as part of a round with a greater K.

    The own state of ``inner`` stays up to date, so ``inner`` can propose more tokens again in any later round.

    Args:
      inner: a drafter of chains.
      most: the number of tokens that are proposed at most. 0: ``inner`` is not asked.
    """

    inner: Drafter
    most: int

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        return Plan((num_speculative_tokens + 1,), self.inner.plan(target, num_speculative_tokens).taps)

    def propose(
        self, target: Model, own: Any, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, Any, KVCache]:
        if self.most == 0:
            shape = len(state.lengths), num_speculative_tokens
            return Draft(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), None), own, state.cache
        draft, own, cache = self.inner.propose(target, own, state, keys, self.most)
        return widened(draft, num_speculative_tokens), own, cache


jax.tree_util.register_dataclass(Shortened, data_fields=["inner"], meta_fields=["most"])


def by_length(decoder: Decoder) -> dict[int, Decoder]:
    """Decoders of one state that draft K tokens, half as many and none, by the number of tokens that they draft.

    The drafter must draft chains and learn from the answers to a chain alone. For other drafters there is only the
    given decoder.
    """
    plan, size = decoder.plan, decoder.num_speculative_tokens
    if plan.trees or plan.block != size + 1:
        return {size: decoder}
    shorter = {
        most: dataclasses.replace(decoder, drafter=Shortened(decoder.drafter, most), block_width=most + 1)
        for most in {0, size // 2} - {size}
    }
    return {**shorter, size: decoder}
