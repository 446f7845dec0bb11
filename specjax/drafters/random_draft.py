"""Random drafts: the lower bound of every drafter, and a test that exactness does not depend on good drafts."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decode.types import DecodeState, Draft
from specjax.drafting.base import Stateless, static
from specjax.drafting.draw_chain import draw_chain
from specjax.models.cache import KVCache
from specjax.models.model import Model


@static
@dataclasses.dataclass(frozen=True)
class RandomDraft(Stateless):
    """Draws K tokens uniformly from the tokens that the request's own sampling filters allow."""

    def propose(
        self, target: Model, own: tuple, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, tuple, KVCache]:
        vocab = target.vocab_size

        def next_logits(carry, previous, last, position):
            return jnp.zeros((last.shape[0], vocab), jnp.float32), carry

        # At a temperature of 0, equal logits would always give token 0, so the request's temperature is replaced.
        draft, _ = draw_chain(next_logits, (), state, keys, num_speculative_tokens, vocab, temperature=1.0)
        return draft, own, state.cache
