"""EAGLE-3's draft head: one decoder layer over the target's own hidden states (Li et al. 2025, EAGLE-3, section 3).

Entry j of the head's sequence joins the target's hidden states at token j with the embedding of token j + 1. The output
of entry j predicts token j + 2. At tokens that the target has not read yet, the head's own last output stands for the
target's hidden states.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from specjax.models import llama, modules, rope
from specjax.models.attention import Block
from specjax.models.axes import of_rows
from specjax.models.cache import KVCache, alloc
from specjax.models.config import LlamaConfig
from specjax.models.heads.taps import check_taps
from specjax.models.product import product
from specjax.models.stack import positions_of


@dataclasses.dataclass(frozen=True)
class Eagle3HeadConfig(modules.Config):
    """The head's shape.

    Args:
      layer: the decoder layer. ``vocab_size`` is the number of tokens that the head can draft, and the hidden size is
        the target's.
      taps: numbers of the target's layers after which the head reads hidden states, rising, each once.

    Raises:
      ValueError: the taps are not such numbers.
    """

    layer: LlamaConfig
    taps: tuple[int, ...]

    def __post_init__(self):
        check_taps("an EAGLE-3 head", self.taps)

    @property
    def module(self) -> type:
        return Eagle3Head

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Eagle3HeadConfig":
        return cls(LlamaConfig.from_dict(data["layer"]), tuple(data["taps"]))


class Eagle3Head(nnx.Module):
    """The head without an embedding: it uses the target's."""

    def __init__(self, config: Eagle3HeadConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        c = config.layer
        self.config = c
        size, eps = c.hidden_size, c.rms_norm_eps
        self.fuse = llama.Linear((size,), len(config.taps) * size, False, rngs=rngs, dtype=dtype)
        self.embed_norm = llama.RMSNorm(size, eps, dtype=dtype)
        self.hidden_norm = llama.RMSNorm(size, eps, dtype=dtype)
        self.attention = llama.Attention(c, 2 * size, rngs=rngs, dtype=dtype)
        self.mlp_norm = llama.RMSNorm(size, eps, dtype=dtype)
        self.mlp = llama.MLP(c, rngs=rngs, dtype=dtype)
        self.norm = llama.RMSNorm(size, eps, dtype=dtype)
        self.lm_head = nnx.Param(jax.random.normal(rngs.params(), (c.vocab_size, size), dtype) * size**-0.5)

    def features(self, taps: Mapping[int, jax.Array], hidden: jax.Array) -> jax.Array:
        """Joins the target's hidden states after each tap, each [B, T, H], to one [B, T, H].

        ``hidden``, the target's hidden states after its norm, is not used. Only EAGLE's first head uses it.
        """
        del hidden
        return self.fuse(jnp.concatenate([taps[after] for after in sorted(taps)], axis=-1))

    def __call__(
        self,
        embedded: jax.Array,
        features: jax.Array,
        cache: KVCache,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Runs a block of entries on top of each row's cached entries.

        Args:
          embedded: [B, T, H], the embedding of the token after each entry's.
          features: [B, T, H], the result of :meth:`features`, or this head's own outputs.
          cache: from :func:`alloc_cache`, used as by :class:`specjax.models.llama.Llama`.
          positions: i32[B, T] rotary positions; None: the row's length, and on from there.
          mask: bool[B, T, S], the entries that each entry sees; None: every entry up to itself.

        Returns:
          Hidden states [B, T, H], before the norm, and the cache with T more entries in each row. The lengths are
          unchanged.
        """
        angles = rope.cos_sin(self.config, positions_of(cache, features.shape[1], positions))
        block = Block(cache.lengths, angles, mask, table=cache.table)
        x = jnp.concatenate([self.embed_norm(embedded), self.hidden_norm(features)], axis=-1)  # [B, T, 2 H]
        attended, keys, values = self.attention(x, block, cache.keys[0], cache.values[0], cache.sharding)
        hidden = features + attended
        hidden = hidden + self.mlp(self.mlp_norm(hidden))
        return hidden, cache.replace(keys=(keys,), values=(values,))

    def head(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [B, T, H] to float32 logits [B, T, D] over the D tokens that the head can draft."""
        return product(self.norm(hidden), self.lm_head[...], jnp.float32)


def alloc_cache(config: Any, batch: int, capacity: int, dtype, mesh: Mesh | None = None) -> KVCache:
    """An empty cache for the one layer of an EAGLE head, for ``batch`` rows of up to ``capacity`` entries.

    Every device of the target's mesh holds all heads of its rows.
    """
    layer = dataclasses.replace(config.layer, num_hidden_layers=1)
    return alloc(layer, batch, capacity, dtype, None if mesh is None else of_rows(mesh))
