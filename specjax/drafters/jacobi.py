"""Jacobi decoding: the target's own answers to a wrong guess are the next guess.

Santilli et al. 2023 (parallel greedy decoding); with sampling, the guess is drawn from the distribution that the last
iteration left for its position and judged against that q (speculative Jacobi decoding, Teng et al. 2024).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.decode import random
from specjax.decode.arrays import span
from specjax.decode.types import DecodeState, Draft, Outcome, Plan
from specjax.drafting.base import FixedWidth, static
from specjax.models.cache import KVCache
from specjax.models.model import Model


class Guess(NamedTuple):
    q: jax.Array  # f32[B, K, V] the next draft's distributions
    known: jax.Array  # i32[B] how many of them answer to a real iteration


@static
@dataclasses.dataclass(frozen=True)
class Jacobi(FixedWidth):
    """Drafts K tokens at no cost of its own: verification's answers past the last kept token are the next draft.

    Its proposals depend on its history, so it is exempt from the law that a fresh start would propose the same. A
    guess at position n depends on draws for positions before n alone, so drawing it again with n's key is sound.
    """

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        # The distributions of a guess are the target's own, and say nothing about how sure a drafter is.
        return super().plan(target, num_speculative_tokens)._replace(gives_probs=False)

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> Guess:
        del capacity
        shape = (batch, num_speculative_tokens, target.vocab_size)
        return Guess(jnp.full(shape, 1.0 / shape[-1], jnp.float32), jnp.zeros(batch, jnp.int32))

    def propose(
        self, target: Model, own: Guess, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, Guess, KVCache]:
        del target
        offset = span(num_speculative_tokens)
        q, known = own
        run_at_least = jnp.full_like(known, q.shape[1])  # the answers at every position are the point
        q = q[:, :num_speculative_tokens]
        tokens = random.categorical(random.at(keys, state.lengths[:, None] + offset), q)
        valid = (offset < known[:, None]) & jnp.isfinite(q[..., 0])
        return Draft(tokens, valid, q, run_at_least=run_at_least), own, state.cache

    def commit(self, target: Model, own: Guess, state: DecodeState, outcome: Outcome | None) -> Guess:
        del target, state
        q, known = own
        if outcome is None:
            return Guess(q, jnp.zeros_like(known))
        size = q.shape[1]
        node = outcome.accepted[:, None] + 1 + span(size)  # the answer to the token before the guessed one
        q = jnp.take_along_axis(outcome.p, jnp.minimum(node, size)[:, :, None], axis=1)
        return Guess(q, size - outcome.accepted)
