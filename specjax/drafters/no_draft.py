"""Plain decoding: every round is one step of the target without a draft."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decode.beam_round import BeamState, Levels
from specjax.decode.types import DecodeState, Draft
from specjax.drafting.base import Stateless, static
from specjax.models.cache import KVCache
from specjax.models.model import Model


@static
@dataclasses.dataclass(frozen=True)
class NoDraft(Stateless):
    """A drafter that proposes nothing, so that each round commits one token of the target."""

    def propose(
        self, target: Model, own: tuple, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, tuple, KVCache]:
        del target, keys
        shape = (state.lengths.shape[0], num_speculative_tokens)
        return Draft(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), None), own, state.cache

    def propose_beams(
        self, target: Model, own: tuple, state: BeamState, num_speculative_tokens: int, width: int
    ) -> tuple[Levels, tuple]:
        del target
        nothing = jnp.zeros((state.lengths.shape[0], num_speculative_tokens, width), jnp.int32)
        return Levels(nothing, nothing), own

    def commit_beams(self, own: tuple, slots: jax.Array, starts: jax.Array, lengths: jax.Array) -> tuple:
        del slots, starts, lengths
        return own
