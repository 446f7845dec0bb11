"""No draft at all: every round is one plain step of the target."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decode.types import DecodeState, Draft
from specjax.drafting.base import Stateless, static
from specjax.models.cache import KVCache
from specjax.models.model import Model


@static
@dataclasses.dataclass(frozen=True)
class NoDraft(Stateless):
    """Plain decoding, as a drafter with nothing to say."""

    def propose(
        self, target: Model, own: tuple, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, tuple, KVCache]:
        del target, keys
        shape = (state.lengths.shape[0], num_speculative_tokens)
        return Draft(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), None), own, state.cache
