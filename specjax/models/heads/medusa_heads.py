"""Medusa's heads: each turns the target's last hidden state into one further token's (Cai et al. 2024, section 2.1)."""

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
      hidden_size: the target's.
      vocab_size: tokens that they can draft.
      num_heads: of them; as many tokens are drafted at most.
      num_layers: residual blocks of each.
      own_heads: whether each has an output head of its own, as in Medusa's own checkpoints; else they share one.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    own_heads: bool = False


class MedusaHeads(nnx.Module):
    """Residual blocks for each head, and an output head for each or for all of them."""

    def __init__(self, config: MedusaHeadsConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        size = config.hidden_size

        def block() -> llama.Linear:
            return llama.Linear((size,), size, True, rngs=rngs, dtype=dtype)

        self.heads = nnx.List([nnx.List([block() for _ in range(config.num_layers)]) for _ in range(config.num_heads)])
        self.own_heads = config.own_heads
        shape = (*((config.num_heads,) if config.own_heads else ()), config.vocab_size, size)
        self.lm_head = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * size**-0.5)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """The target's hidden states [B, T, H], after its norm, to each head's: [B, T, heads, H]."""
        states = []
        for blocks in self.heads:
            x = hidden
            for linear in blocks:
                x = x + jax.nn.silu(linear(x))
            states.append(x)
        return jnp.stack(states, axis=2)

    def head(self, states: jax.Array) -> jax.Array:
        """Those to float32 logits over the tokens that can be drafted: [..., heads, H] to [..., heads, D]."""
        table = self.lm_head[...]
        if not self.own_heads:
            return product(states, table, jnp.float32)
        each = [product(states[..., i, :], own, jnp.float32) for i, own in enumerate(table)]
        return jnp.stack(each, axis=-2)
