"""DFlash's draft head: a few decoder layers predict a whole block of tokens in one call (Chen et al. 2026, DFlash).

The head has two kinds of input. Of each token that the target has read, every layer keeps a key and a value, both made
from the target's own hidden states; no layer computes anything else for these tokens. A block is the last committed
token and masked tokens after it. All tokens of a block see all kept entries and the whole block, and the output at a
masked token predicts the token at its place.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import llama, modules, rope
from specjax.models.attention import Block
from specjax.models.cache import KVCache
from specjax.models.config import LlamaConfig
from specjax.models.heads.taps import check_taps
from specjax.models.product import product
from specjax.models.stack import positions_of


@dataclasses.dataclass(frozen=True)
class DFlashHeadConfig(modules.Config):
    """The head's shape.

    Args:
      layer: the decoder layers. ``vocab_size`` is the number of tokens that the head can draft, and the hidden size is
        the target's.
      taps: numbers of the target's layers after which the head reads hidden states, rising, each once.
      block_size: S, the tokens of a block: the last committed one and S - 1 masked ones.
      mask_token_id: the target's token whose embedding stands for a masked token.

    Raises:
      ValueError: the taps are not such numbers, a layer sees only a window or doesn't rotate, or the block has no
        masked token.
    """

    layer: LlamaConfig
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int

    def __post_init__(self):
        check_taps("a DFlash head", self.taps)
        if self.layer.local_layers or self.layer.unrotated_layers:
            raise ValueError(
                "a DFlash head with layers of sliding_attention, or without rotary positions, is not implemented; got "
                f"windows in layers {self.layer.local_layers} and no positions in layers {self.layer.unrotated_layers}"
            )
        if type(self.block_size) is not int or self.block_size < 2:
            raise ValueError(f"block_size of a DFlash head must be an integer of at least 2, got {self.block_size!r}")
        if type(self.mask_token_id) is not int or self.mask_token_id < 0:
            raise ValueError(f"mask_token_id of a DFlash head must be a token id, got {self.mask_token_id!r}")

    @property
    def module(self) -> type:
        return DFlashHead

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "DFlashHeadConfig":
        layer = LlamaConfig.from_dict(data["layer"])
        return cls(layer, tuple(data["taps"]), data["block_size"], data["mask_token_id"])


def layers_for(target: LlamaConfig, count: int, intermediate_size: int, vocab_size: int) -> LlamaConfig:
    """The layers of a new head for a target: as those of the published heads, which are layers of Qwen 3.

    Args:
      target: the target's shape, whose heads and rotary positions the layers take over.
      count: the number of layers.
      intermediate_size: the width of each MLP.
      vocab_size: D, the number of tokens that the head can draft.
    """
    c = target
    return LlamaConfig(
        vocab_size, c.hidden_size, intermediate_size, count, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
        c.max_position_embeddings, c.rms_norm_eps, c.rope_theta, c.rope_scaling, model_type="qwen3", qk_norm=True,
    )  # fmt: skip


class DFlashHead(nnx.Module):
    """The head without an embedding: it uses the target's."""

    def __init__(self, config: DFlashHeadConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        c = config.layer
        self.config = c
        size, eps = c.hidden_size, c.rms_norm_eps
        self.fuse = llama.Linear((size,), len(config.taps) * size, False, rngs=rngs, dtype=dtype)
        self.hidden_norm = llama.RMSNorm(size, eps, dtype=dtype)
        self.layers = nnx.List([llama.Layer(c, rngs=rngs, dtype=dtype) for _ in range(c.num_hidden_layers)])
        self.norm = llama.RMSNorm(size, eps, dtype=dtype)
        self.lm_head = nnx.Param(jax.random.normal(rngs.params(), (c.vocab_size, size), dtype) * size**-0.5)

    def remember(self, taps: Mapping[int, jax.Array], cache: KVCache) -> KVCache:
        """Writes the entries of T tokens that the target has read, from each row's length on. Lengths stay as they are.

        Args:
          taps: the target's hidden states after each tapped layer, each [B, T, H].
          cache: one layer of keys and values for each of the head's.
        """
        read = self.hidden_norm(self.fuse(jnp.concatenate([taps[after] for after in sorted(taps)], axis=-1)))
        block = self._block(cache, read.shape[1], None, None)
        buffers = zip(self.layers, cache.keys, cache.values, strict=True)
        new = [layer.attention.remember(read, block, keys, values) for layer, keys, values in buffers]
        return cache.replace(keys=tuple(keys for keys, _ in new), values=tuple(values for _, values in new))

    def __call__(
        self, embedded: jax.Array, cache: KVCache, positions: jax.Array | None = None, mask: jax.Array | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Runs a block of tokens on top of each row's cached entries.

        Args:
          embedded: [B, T, H], the embeddings of the block's tokens.
          cache: as in :meth:`remember`. The block's entries are written from each row's length on.
          positions: i32[B, T] rotary positions; None: the row's length, and on from there.
          mask: bool[B, T, S], the entries that each token sees; None: every entry up to the end of the block.

        Returns:
          Hidden states [B, T, H], before the norm, and the cache. Its lengths are unchanged.
        """
        if mask is None:
            ends = cache.lengths + embedded.shape[1]
            mask = jnp.arange(cache.capacity, dtype=jnp.int32) < ends[:, None]  # [B, S]
            mask = jnp.broadcast_to(mask[:, None], (*embedded.shape[:2], cache.capacity))
        x, block = embedded, self._block(cache, embedded.shape[1], positions, mask)
        new = []
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            x, keys, values = layer(x, block, keys, values, cache.sharding, (True, True))
            new.append((keys, values))
        return x, cache.replace(keys=tuple(keys for keys, _ in new), values=tuple(values for _, values in new))

    def head(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [B, T, H] to float32 logits [B, T, D] over the D tokens that the head can draft."""
        return product(self.norm(hidden), self.lm_head[...], jnp.float32)

    def _block(self, cache: KVCache, size: int, positions: jax.Array | None, mask: jax.Array | None) -> Block:
        angles = rope.cos_sin(self.config, positions_of(cache, size, positions))
        return Block(cache.lengths, angles, mask, table=cache.table)
