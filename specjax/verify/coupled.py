"""Coupled verification: the target's own draws decide, so the output is token for token that of plain decoding.

The target draws argmax(log p + G) with Gumbel noise G addressed by absolute position; a drafted token stands when it
equals that draw. A drafter that draws with the same noise agrees with probability at least (1 - TV)/(1 + TV) (Daliri
et al. 2024, "Coupling without communication and drafter-invariant speculative decoding").
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax import random
from specjax.types import Draft, Verdict
from specjax.verify import chain


@dataclasses.dataclass(frozen=True)
class Coupled:
    """Accept while the drafted token is the one that plain decoding would draw at its position."""

    lossless = True

    def draft_keys(self, keys: jax.Array, lengths: jax.Array) -> jax.Array:
        del lengths
        return random.fold(keys, random.TOKEN)  # the target's own noise

    def verify(self, p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
        positions = lengths[:, None] + jnp.arange(p.shape[1])  # [B, K+1]
        drawn = random.categorical(random.at(self.draft_keys(keys, lengths), positions), p)
        count = chain.leading_run(draft.valid & (drawn[:, :-1] == draft.tokens))
        return Verdict(count, chain.row_at(drawn, count))
