"""GPT-2 as Flax nnx modules (Radford et al. 2019, section 2.3): learned positions, LayerNorm, GELU, tied head.

Logits follow Hugging Face's ``GPT2LMHeadModel``. Its ``Conv1D`` weights are [in, out]; here they are [out, in], as
Llama's.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from specjax.models import attention
from specjax.models.attention import Block
from specjax.models.cache import KVCache
from specjax.models.gpt2_config import GPT2Config
from specjax.models.llama import Linear
from specjax.models.stack import Stack


class LayerNorm(nnx.Module):
    """(x - mean(x)) / sqrt(var(x) + eps), times a weight and plus a bias for each of the ``size`` channels."""

    def __init__(self, size: int, eps: float, *, dtype):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.bias = nnx.Param(jnp.zeros(size, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        xf = x.astype(jnp.float32)
        xf = xf - jnp.mean(xf, axis=-1, keepdims=True)
        normed = xf * lax.rsqrt(jnp.mean(xf * xf, axis=-1, keepdims=True) + self.eps)
        both = (leaf[...].astype(jnp.float32) for leaf in (self.weight, self.bias))
        weight, bias = (jnp.expand_dims(leaf, range(x.ndim - 1)) for leaf in both)
        return (normed * weight + bias).astype(x.dtype)


class Attention(nnx.Module):
    """Attention over the cache. The rows of ``qkv`` are ordered by head: its query, then its key, then its value."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs, dtype):
        c = config
        self.config = c
        self.qkv = Linear((c.num_attention_heads, 3 * c.head_dim), c.hidden_size, True, rngs=rngs, dtype=dtype)
        self.o = Linear((c.hidden_size,), c.hidden_size, True, rngs=rngs, dtype=dtype)

    def __call__(self, x, block: Block, keys, values, sharding):
        """x [B, T, H] -> [B, T, H], and the new keys and values. See :func:`specjax.models.attention.attend`."""
        c = self.config
        qkv = self.qkv(x).reshape(*x.shape[:2], c.num_attention_heads, 3, c.head_dim)
        out, keys, values = attention.attend(qkv, block, keys, values, sharding)
        return self.o(out), keys, values


class MLP(nnx.Module):
    """down(gelu(up(x))), with the tanh form of gelu (``gelu_new``)."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs, dtype):
        c = config
        self.up = Linear((c.intermediate_size,), c.hidden_size, True, rngs=rngs, dtype=dtype)
        self.down = Linear((c.hidden_size,), c.intermediate_size, True, rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


class Layer(nnx.Module):
    """Attention, then MLP. Each reads the norm of the hidden states, and its output is added to them."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs, dtype):
        c = config
        self.attention_norm = LayerNorm(c.hidden_size, c.layer_norm_epsilon, dtype=dtype)
        self.attention = Attention(c, rngs=rngs, dtype=dtype)
        self.mlp_norm = LayerNorm(c.hidden_size, c.layer_norm_epsilon, dtype=dtype)
        self.mlp = MLP(c, rngs=rngs, dtype=dtype)

    def __call__(self, x, block: Block, keys, values, sharding, run: tuple[bool, bool]):
        """As :class:`specjax.models.llama.Layer`."""
        if run[0]:
            attended, keys, values = self.attention(self.attention_norm(x), block, keys, values, sharding)
            x = x + attended
        return x + self.mlp(self.mlp_norm(x)) if run[1] else x, keys, values


class GPT2(Stack):
    """A GPT-2. Arguments as of :class:`specjax.models.llama.Llama`."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs, dtype=jnp.float32):
        c = config
        self.config = c
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (c.vocab_size, c.hidden_size), dtype))
        places = (c.max_position_embeddings, c.hidden_size)
        self.position_embed = nnx.Param(jax.random.normal(rngs.params(), places, dtype))
        self.layers = nnx.List([Layer(c, rngs=rngs, dtype=dtype) for _ in range(c.num_hidden_layers)])
        self.norm = LayerNorm(c.hidden_size, c.layer_norm_epsilon, dtype=dtype)

    def placed(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        # A drafted token may stand past the last position. Such a token is never kept, so any finite row will do.
        return x + self.position_embed[...].at[positions].get(mode="clip")

    def blocks(self, cache: KVCache, positions: jax.Array, mask: jax.Array | None) -> list[Block]:
        return [Block(cache.lengths, None, mask, table=cache.table)] * len(self.layers)
