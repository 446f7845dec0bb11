"""Drafters with a smaller model of their own. The own state of such a drafter is the cache of its model."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.decode.prefill import read_along, read_sources
from specjax.decode.types import DecodeState, Outcome
from specjax.models import cache as kv
from specjax.models.cache import KVCache
from specjax.models.model import Model, Output


class DraftState(NamedTuple):
    # The draft model's cache. Its lengths say how many tokens of the text it holds.
    cache: KVCache


class OwnModel:
    """A drafter that decodes with a model of its own, ``lm``. A subclass adds ``plan``, ``init`` and ``propose``."""

    lm: Model

    def follow(self, target: Model, own: DraftState, state: DecodeState, starts: jax.Array, out: Output) -> DraftState:
        del target
        return DraftState(read_along(self.lm, own.cache, state, starts, out.hidden.shape[1]).cache)

    def resume(self, target: Model, own: DraftState, state: DecodeState) -> DraftState:
        del target  # decoders catch up in ``propose``
        return DraftState(read_sources(self.lm, own.cache, state))

    def commit(self, target: Model, own: DraftState, state: DecodeState, outcome: Outcome | None) -> DraftState:
        # The last committed token is a correction or a bonus, which the draft model has not read. Entries past the
        # cache's length, such as a tree's, count as stale.
        del target, outcome
        return DraftState(kv.with_lengths(own.cache, jnp.minimum(own.cache.lengths, state.lengths - 1)))
