"""Medusa's heads (Cai et al. 2024, section 2.1).

Each head makes of the target's last hidden state a state that predicts a later token: head i one token later than head
i - 1.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import llama, modules
from specjax.models.product import product


@dataclasses.dataclass(frozen=True)
class MedusaHeadsConfig(modules.Config):
    """The heads' shape.

    Args:
      hidden_size: the target's hidden size.
      vocab_size: D, the number of tokens that the heads can draft.
      num_heads: the number of heads. At most as many tokens are drafted.
      num_layers: the number of residual blocks in each head.
      own_heads: whether each head has an output head of its own, as in Medusa's own checkpoints. Otherwise all heads
        share one.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    own_heads: bool = False


class MedusaHeads(nnx.Module):
    """The residual blocks of each head, and one output head for each head or for all of them."""

    def __init__(self, config: MedusaHeadsConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        size = config.hidden_size

        def block() -> llama.Linear:
            return llama.Linear((size,), size, True, rngs=rngs, dtype=dtype)

        self.heads = nnx.List([nnx.List([block() for _ in range(config.num_layers)]) for _ in range(config.num_heads)])
        self.own_heads = config.own_heads
        shape = (*((config.num_heads,) if config.own_heads else ()), config.vocab_size, size)
        self.lm_head = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * size**-0.5)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """The target's hidden states [B, T, H], after its norm, to the states of the heads, [B, T, heads, H]."""
        states = []
        for blocks in self.heads:
            x = hidden
            for linear in blocks:
                x = x + jax.nn.silu(linear(x))
            states.append(x)
        return jnp.stack(states, axis=2)

    def head(self, states: jax.Array) -> jax.Array:
        """The heads' states [..., heads, H] to float32 logits [..., heads, D] over the tokens that can be drafted."""
        table = self.lm_head[...]
        if not self.own_heads:
            return product(states, table, jnp.float32)
        logits = [product(states[..., i, :], head_table, jnp.float32) for i, head_table in enumerate(table)]
        return jnp.stack(logits, axis=-2)
