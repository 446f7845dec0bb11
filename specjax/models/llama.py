"""Llama and its relatives as Flax nnx modules: fused q/k/v and gate/up products, weights kept as [out, in].

Weights are [out, in], because XLA then reads each weight once, in place (see docs/performance.md). Logits follow
Hugging Face's ``LlamaForCausalLM``: rotary embeddings of the rotate-half kind, and RMS norm with float32 statistics.
The features of relatives (:mod:`specjax.models.relatives`) are static, so a feature that is off leaves no trace in the
program.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from specjax.models import attention, modules, rope
from specjax.models import blocks as layer_blocks
from specjax.models.attention import Block
from specjax.models.cache import KVCache
from specjax.models.config import LlamaConfig
from specjax.models.product import product
from specjax.models.stack import Stack

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": jax.nn.gelu}  # jax's gelu is the tanh form by default


class Linear(nnx.Module):
    """y = x W^T + b, with W [*out, in]. ``out`` has several axes where several products are fused into one."""

    def __init__(self, out: tuple[int, ...], inp: int, bias: bool, *, rngs: nnx.Rngs, dtype):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (*out, inp), dtype) * inp**-0.5)
        if bias:
            self.bias = nnx.Param(jnp.zeros(out, dtype))
        self.has_bias = bias

    def __call__(self, x: jax.Array) -> jax.Array:
        y = product(x, self.weight[...], x.dtype)
        return y + jnp.expand_dims(self.bias[...], range(x.ndim - 1)) if self.has_bias else y


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps), times a weight for each of the ``size`` channels; Gemma: times 1 + weight."""

    def __init__(self, size: int, eps: float, plus_one: bool = False, *, dtype):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps
        self.plus_one = plus_one

    def __call__(self, x: jax.Array) -> jax.Array:
        xf = x.astype(jnp.float32)
        normed = xf * lax.rsqrt(jnp.mean(xf * xf, axis=-1, keepdims=True) + self.eps)
        if self.plus_one:
            factor = 1 + self.weight[...].astype(jnp.float32)
            return (jnp.expand_dims(factor, range(x.ndim - 1)) * normed).astype(x.dtype)
        return jnp.expand_dims(self.weight[...], range(x.ndim - 1)) * normed.astype(x.dtype)


def _norm(config: LlamaConfig, size: int, dtype) -> RMSNorm:
    return RMSNorm(size, config.rms_norm_eps, config.norm_plus_one, dtype=dtype)


class Attention(nnx.Module):
    """Grouped-query attention over the cache. ``inp`` is the size of its input.

    The rows of ``qkv`` are ordered by kv head: for each kv head its query heads, then its key head, then its value
    head. So a shard of the kv heads is one contiguous slice of the weight.
    """

    def __init__(self, config: LlamaConfig, inp: int, *, rngs: nnx.Rngs, dtype):
        c = config
        self.config = c
        width = (c.group_size + 2) * c.head_dim
        bias = c.attention_bias or c.qkv_bias
        self.qkv = Linear((c.num_key_value_heads, width), inp, bias, rngs=rngs, dtype=dtype)
        inner = c.num_attention_heads * c.head_dim
        self.o = Linear((c.hidden_size,), inner, c.attention_bias, rngs=rngs, dtype=dtype)
        if c.qk_norm:
            self.q_norm, self.k_norm = (_norm(c, c.head_dim, dtype) for _ in range(2))

    def __call__(self, x, block: Block, keys, values, sharding):
        """x [B, T, inp] -> [B, T, H], and the new keys and values. See :func:`specjax.models.attention.attend`."""
        c = self.config
        score = attention.Score(c.score_scale, c.attn_logit_softcapping)
        out, keys, values = attention.attend(self._heads(x), block, keys, values, sharding, score)
        return self.o(out), keys, values

    def remember(self, x, block: Block, keys, values):
        """Writes the keys and values of x [B, T, inp] to the cache, and mixes nothing. -> the new keys and values."""
        qkv = self._heads(x)
        k = qkv[..., -2, :] if block.angles is None else rope.rotate(qkv[..., -2, :], *block.angles)
        return attention.written(k, qkv[..., -1, :], block, keys, values)

    def _heads(self, x):
        """x [B, T, inp] -> [B, T, kv_heads, group + 2, D]: for each kv head its queries, its key and its value."""
        c = self.config
        qkv = self.qkv(x).reshape(*x.shape[:2], c.num_key_value_heads, c.group_size + 2, c.head_dim)
        if not c.qk_norm:
            return qkv
        q, k, v = jnp.split(qkv, [c.group_size, c.group_size + 1], axis=3)  # [B, T, kv_heads, group or 1, D]
        return jnp.concatenate([self.q_norm(q), self.k_norm(k), v], axis=3)


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x)), where act is silu, or gelu in Gemma. Gate and up are one fused product."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype):
        c = config
        self.hidden_act = c.hidden_act
        self.gate_up = Linear((2, c.intermediate_size), c.hidden_size, c.mlp_bias, rngs=rngs, dtype=dtype)
        self.down = Linear((c.hidden_size,), c.intermediate_size, c.mlp_bias, rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        both = self.gate_up(x)  # [B, T, 2, F]
        return self.down(ACTIVATIONS[self.hidden_act](both[:, :, 0]) * both[:, :, 1])


class Layer(nnx.Module):
    """Attention, then MLP. Each reads the norm of the hidden states, and its output is added to them.

    In Gemma the outputs too are normed, before they are added.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype):
        size = config.hidden_size
        self.attention_norm = _norm(config, size, dtype)
        self.attention = Attention(config, size, rngs=rngs, dtype=dtype)
        self.mlp_norm = _norm(config, size, dtype)
        self.mlp = MLP(config, rngs=rngs, dtype=dtype)
        self.has_post_norms = config.post_norms
        if config.post_norms:
            self.post_attention_norm, self.post_mlp_norm = (_norm(config, size, dtype) for _ in range(2))

    def __call__(self, x, block: Block, keys, values, sharding, run: tuple[bool, bool]):
        """x [B, T, H] -> [B, T, H], and the new keys and values.

        ``run`` says whether attention and whether the MLP take part. A part that is left out costs nothing.
        """
        if run[0]:
            attended, keys, values = self.attention(self.attention_norm(x), block, keys, values, sharding)
            x = x + (self.post_attention_norm(attended) if self.has_post_norms else attended)
        if run[1]:
            fed = self.mlp(self.mlp_norm(x))
            x = x + (self.post_mlp_norm(fed) if self.has_post_norms else fed)
        return x, keys, values


class Llama(Stack):
    """A decoder of Llama or a relative.

    Args:
      config: the model's shape.
      rngs: draws random weights, for tests and training. Converted weights replace them.
      dtype: the dtype of the weights, the activations and the cache.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.config = config
        table = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(jax.random.normal(rngs.params(), table, dtype))
        self.layers = nnx.List([Layer(config, rngs=rngs, dtype=dtype) for _ in range(config.num_hidden_layers)])
        self.norm = _norm(config, config.hidden_size, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Param(jax.random.normal(rngs.params(), table, dtype) * config.hidden_size**-0.5)

    def blocks(self, cache: KVCache, positions: jax.Array, mask: jax.Array | None) -> list[Block]:
        return layer_blocks.blocks(self.config, cache, positions, mask)

    def head(self, hidden: jax.Array) -> jax.Array:
        logits, cap = super().head(hidden), self.config.final_logit_softcapping
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def structure(config: LlamaConfig) -> tuple[nnx.GraphDef, dict]:
    """The module's graph definition, and its parameter tree with shapes as leaves. Keys are strings, also of lists."""
    return modules.structure(Llama, config)


def merge(config: LlamaConfig, params: dict) -> Llama:
    """The module with the weights of a parameter tree. Inside ``jit`` the call costs nothing at run time."""
    return modules.merge(Llama, config, params)
