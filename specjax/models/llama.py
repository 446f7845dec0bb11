"""Llama as Flax nnx modules: unrolled layers, fused q/k/v and gate/up products, weights kept as [out, in].

Layers are unrolled and weights are [out, in], because XLA then reads each weight once, in place (see
docs/performance.md). Logits follow Hugging Face's ``LlamaForCausalLM``: rotary embeddings of the rotate-half kind, and
RMS norm with float32 statistics.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from specjax.decode.arrays import span
from specjax.models import attention, modules, rope
from specjax.models.attention import Block
from specjax.models.cache import KVCache
from specjax.models.config import LlamaConfig
from specjax.models.model import Output
from specjax.models.product import product
from specjax.models.quantized import dequantize


def positions_of(cache: KVCache, size: int, given: jax.Array | None) -> jax.Array:
    """Positions i32[B, T] of a block of ``size`` tokens: ``given``, or else the numbers from each row's length on."""
    return cache.lengths[:, None] + span(size) if given is None else given


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
    """x / sqrt(mean(x^2) + eps), times a weight for each of the ``size`` channels."""

    def __init__(self, size: int, eps: float, *, dtype):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        xf = x.astype(jnp.float32)
        normed = xf * lax.rsqrt(jnp.mean(xf * xf, axis=-1, keepdims=True) + self.eps)
        return jnp.expand_dims(self.weight[...], range(x.ndim - 1)) * normed.astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention over the cache. ``inp`` is the size of its input.

    The rows of ``qkv`` are ordered by kv head: for each kv head its query heads, then its key head, then its value
    head. So a shard of the kv heads is one contiguous slice of the weight.
    """

    def __init__(self, config: LlamaConfig, inp: int, *, rngs: nnx.Rngs, dtype):
        c = config
        self.config = c
        width = (c.group_size + 2) * c.head_dim
        self.qkv = Linear((c.num_key_value_heads, width), inp, c.attention_bias, rngs=rngs, dtype=dtype)
        inner = c.num_attention_heads * c.head_dim
        self.o = Linear((c.hidden_size,), inner, c.attention_bias, rngs=rngs, dtype=dtype)

    def __call__(self, x, block: Block, keys, values, sharding):
        """x [B, T, inp] -> [B, T, H], and the new keys and values. See :func:`specjax.models.attention.attend`."""
        c = self.config
        qkv = self.qkv(x).reshape(*x.shape[:2], c.num_key_value_heads, c.group_size + 2, c.head_dim)
        out, keys, values = attention.attend(qkv, block, keys, values, sharding)
        return self.o(out), keys, values


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)). Gate and up are one fused product."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype):
        c = config
        self.gate_up = Linear((2, c.intermediate_size), c.hidden_size, c.mlp_bias, rngs=rngs, dtype=dtype)
        self.down = Linear((c.hidden_size,), c.intermediate_size, c.mlp_bias, rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        both = self.gate_up(x)  # [B, T, 2, F]
        return self.down(jax.nn.silu(both[:, :, 0]) * both[:, :, 1])


class Layer(nnx.Module):
    """Attention, then MLP. Each reads the norm of the hidden states, and its output is added to them."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, config.hidden_size, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, rngs=rngs, dtype=dtype)

    def __call__(self, x, block: Block, keys, values, sharding, run: tuple[bool, bool]):
        """x [B, T, H] -> [B, T, H], and the new keys and values.

        ``run`` says whether attention and whether the MLP take part. A part that is left out costs nothing.
        """
        if run[0]:
            attended, keys, values = self.attention(self.attention_norm(x), block, keys, values, sharding)
            x = x + attended
        return x + self.mlp(self.mlp_norm(x)) if run[1] else x, keys, values


def _traced_once() -> Callable:
    """A function that calls a layer, given as graph definition and weights. All layers of one shape share one trace.

    Without it JAX would trace every layer, which takes longer than loading the weights of a small model. XLA inlines
    the calls, so the compiled program is the same. Each call of the model makes a new function, because the trace
    depends not only on the arguments but also on the mesh and the environment.
    """

    def call(graphdef, weights, x, block, keys, values, sharding, run):
        return nnx.merge(graphdef, weights)(x, block, keys, values, sharding, run)

    return jax.jit(call, static_argnames=("graphdef", "sharding", "run"))


class Llama(nnx.Module):
    """A Llama-family decoder.

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
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Param(jax.random.normal(rngs.params(), table, dtype) * config.hidden_size**-0.5)

    def __call__(
        self,
        tokens: jax.Array | None,
        cache: KVCache,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
        with_logits: bool = True,
        run: tuple[tuple[bool, bool], ...] | None = None,
        taps: tuple[int, ...] = (),
        embedded: jax.Array | None = None,
        whole: Callable[[jax.Array], jax.Array] = lambda x: x,
    ) -> Output:
        """Runs a block of tokens on top of each row's cached prefix.

        Args:
          tokens: i32[B, T]; None if ``embedded`` is given.
          cache: the T new entries are written from each row's length on. The caller guarantees
            ``lengths + T <= capacity``.
          positions: i32[B, T] rotary positions; None: the row's length, and on from there.
          mask: bool[B, T, S], the cache slots that each token sees; None: every slot up to the token's own.
          with_logits: False skips the output head, and the logits are [B, T, 0].
          run: for each layer, whether its attention and whether its MLP take part (static); None: all do.
          taps: numbers of layers after which the hidden states are returned too (static); 0 is the embedding.
          embedded: [B, T, H], the first layer's input in place of the tokens' embeddings.
          whole: on a mesh, gives every device the whole of an array. Without it the partitioner would keep hidden
            states in parts, which doubles the messages between devices. The logits would be in parts too, and each
            pass of a sampling filter would then send messages.
        """
        x = dequantize(self.embed[...][tokens], self.norm.weight[...].dtype) if embedded is None else embedded
        x = whole(x)  # [B, T, H]
        angles = rope.cos_sin(self.config, positions_of(cache, x.shape[1], positions))
        block = Block(cache.lengths, angles, mask, table=cache.table)
        keys, values, hidden_after = [], [], [x]
        run = ((True, True),) * len(self.layers) if run is None else run
        call = _traced_once()
        for layer, parts, layer_keys, layer_values in zip(self.layers, run, cache.keys, cache.values, strict=True):
            buffers = layer_keys, layer_values
            x, layer_keys, layer_values = call(*nnx.split(layer), x, block, *buffers, cache.sharding, parts)
            keys.append(layer_keys)
            values.append(layer_values)
            hidden_after.append(x)
        hidden = whole(self.norm(x))
        logits = whole(self.head(hidden)) if with_logits else jnp.zeros((*x.shape[:2], 0), jnp.float32)
        cache = cache.replace(keys=tuple(keys), values=tuple(values))
        return Output(logits, hidden, cache, {after: whole(hidden_after[after]) for after in taps})

    def head(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [B, T, H] to float32 logits [B, T, V]."""
        table = self.embed if self.config.tie_word_embeddings else self.lm_head
        return product(hidden, table[...], jnp.float32)


def structure(config: LlamaConfig) -> tuple[nnx.GraphDef, dict]:
    """The module's graph definition, and its parameter tree with shapes as leaves. Keys are strings, also of lists."""
    return modules.structure(Llama, config)


def merge(config: LlamaConfig, params: dict) -> Llama:
    """The module with the weights of a parameter tree. Inside ``jit`` the call costs nothing at run time."""
    return modules.merge(Llama, config, params)
