"""Trained look-ahead tokens: input embeddings that stand for tokens to come (Monea et al. 2023, PaSS, section 3)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import modules


@dataclasses.dataclass(frozen=True)
class PassConfig(modules.Config):
    """The shape of the look-ahead tokens.

    Args:
      hidden_size: the target's hidden size.
      num_tokens: L, the number of look-ahead tokens after the last real token. At most L + 1 tokens are drafted.
    """

    hidden_size: int
    num_tokens: int = 3


class PassTokens(nnx.Module):
    """The embeddings of the look-ahead tokens, [L, H]."""

    def __init__(self, config: PassConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        shape = (config.num_tokens, config.hidden_size)
        self.table = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * 0.02)
