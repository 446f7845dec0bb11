"""The draft head of EAGLE and EAGLE-2: one decoder layer over the target's last hidden states (Li et al. 2024, 4.1).

Its entries are those of ``eagle3_head``. The layer has no norm before its attention. The layer's output stands for the
target's last hidden state, so the target's output head reads the output without a further norm.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import llama, modules, rope
from specjax.models.attention import Block
from specjax.models.cache import KVCache
from specjax.models.config import LlamaConfig
from specjax.models.product import product
from specjax.models.stack import positions_of


@dataclasses.dataclass(frozen=True)
class Eagle1HeadConfig(modules.Config):
    """The head's shape.

    Args:
      layer: the decoder layer. ``vocab_size`` is the number of tokens that the head can draft, and the hidden size is
        the target's.
      bias: whether the product that joins embedding and hidden state has a bias.
    """

    layer: LlamaConfig
    bias: bool = True
    taps: ClassVar[tuple[int, ...]] = ()

    @property
    def module(self) -> type:
        return Eagle1Head

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Eagle1HeadConfig":
        return cls(LlamaConfig.from_dict(data["layer"]), data["bias"])


class Eagle1Head(nnx.Module):
    """The head without an embedding: it uses the target's. The methods are those of EAGLE-3's head."""

    def __init__(self, config: Eagle1HeadConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        c = config.layer
        self.config = c
        size = c.hidden_size
        self.fuse = llama.Linear((size,), 2 * size, config.bias, rngs=rngs, dtype=dtype)
        self.attention = llama.Attention(c, size, rngs=rngs, dtype=dtype)
        self.mlp_norm = llama.RMSNorm(size, c.rms_norm_eps, dtype=dtype)
        self.mlp = llama.MLP(c, rngs=rngs, dtype=dtype)
        self.lm_head = nnx.Param(jax.random.normal(rngs.params(), (c.vocab_size, size), dtype) * size**-0.5)

    def features(self, taps: Mapping[int, jax.Array], hidden: jax.Array) -> jax.Array:
        """The target's hidden states after its norm, [B, T, H], unchanged. This head has no taps."""
        del taps
        return hidden

    def __call__(
        self,
        embedded: jax.Array,
        features: jax.Array,
        cache: KVCache,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        angles = rope.cos_sin(self.config, positions_of(cache, features.shape[1], positions))
        block = Block(cache.lengths, angles, mask, table=cache.table)
        x = self.fuse(jnp.concatenate([embedded, features], axis=-1))
        attended, keys, values = self.attention(x, block, cache.keys[0], cache.values[0], cache.sharding)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache.replace(keys=(keys,), values=(values,))

    def head(self, hidden: jax.Array) -> jax.Array:
        return product(hidden, self.lm_head[...], jnp.float32)
