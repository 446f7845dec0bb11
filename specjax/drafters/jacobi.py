"""Jacobi decoding: the target's own answers to a wrong guess are the next guess.

Santilli et al. 2023 describe the method for greedy decoding. With sampling, a round leaves a distribution for each
position after the kept tokens. The next guess is drawn from these distributions, and judged with them as q (speculative
Jacobi decoding, Teng et al. 2024).
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
    # f32[B, K, V] The distributions of the next draft's tokens.
    q: jax.Array
    # i32[B] How many of these distributions come from the last round. The others are no guess yet and are not drafted.
    known: jax.Array


@static
@dataclasses.dataclass(frozen=True)
class Jacobi(FixedWidth):
    """Drafts up to K tokens without a model call: the target's answers past the last kept token are the next draft.

    The proposals depend on the row's history, so Jacobi is exempt from the law that a fresh start would propose the
    same. A guess for position n depends only on draws for positions before n. So the guess may be drawn again with the
    key of position n.
    """

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        # The distributions are the target's answers to a wrong guess. They don't say how sure a drafter is.
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
        run_at_least = jnp.full_like(known, q.shape[1])  # all K answers are needed for the next draft
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
        node = outcome.accepted[:, None] + 1 + span(size)  # the node before each position of the next draft
        q = jnp.take_along_axis(outcome.p, jnp.minimum(node, size)[:, :, None], axis=1)
        return Guess(q, size - outcome.accepted)
