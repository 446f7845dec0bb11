"""Llama as Flax nnx modules: unrolled layers, fused q/k/v and gate/up products, weights kept [out, in].

Unrolled and [out, in] because XLA then reads each weight once, where it lies (design notes in docs/performance.md).
Logits follow Hugging Face's ``LlamaForCausalLM``: rotate-half rotary embeddings, RMS norm with float32 statistics.
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
    """i32[B, T] of a block of ``size`` tokens: those given, or one a token on top of each row."""
    return cache.lengths[:, None] + span(size) if given is None else given


class Linear(nnx.Module):
    """y = x W^T + b, with W [*out, in]: a fused product keeps its parts on axes of their own."""

    def __init__(self, out: tuple[int, ...], inp: int, bias: bool, *, rngs: nnx.Rngs, dtype):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (*out, inp), dtype) * inp**-0.5)
        if bias:
            self.bias = nnx.Param(jnp.zeros(out, dtype))
        self.has_bias = bias

    def __call__(self, x: jax.Array) -> jax.Array:
        y = product(x, self.weight[...], x.dtype)
        return y + jnp.expand_dims(self.bias[...], range(x.ndim - 1)) if self.has_bias else y


class RMSNorm(nnx.Module):
    def __init__(self, size: int, eps: float, *, dtype):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        xf = x.astype(jnp.float32)
        normed = xf * lax.rsqrt(jnp.mean(xf * xf, axis=-1, keepdims=True) + self.eps)
        return jnp.expand_dims(self.weight[...], range(x.ndim - 1)) * normed.astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention over the cache.

    ``qkv`` rows are group-major: for each kv head, its query heads, then its key head, then its value head. A shard
    of the kv heads is then one contiguous slice of the weight. ``inp`` is the size of what it reads.
    """

    def __init__(self, config: LlamaConfig, inp: int, *, rngs: nnx.Rngs, dtype):
        c = config
        self.config = c
        width = (c.group_size + 2) * c.head_dim
        self.qkv = Linear((c.num_key_value_heads, width), inp, c.attention_bias, rngs=rngs, dtype=dtype)
        inner = c.num_attention_heads * c.head_dim
        self.o = Linear((c.hidden_size,), inner, c.attention_bias, rngs=rngs, dtype=dtype)

    def __call__(self, x, block: Block, keys, values, sharding):
        """x [B, T, inp]; the other arguments as of :func:`specjax.models.attention.attend`."""
        c = self.config
        qkv = self.qkv(x).reshape(*x.shape[:2], c.num_key_value_heads, c.group_size + 2, c.head_dim)
        out, keys, values = attention.attend(qkv, block, keys, values, sharding)
        return self.o(out), keys, values


class MLP(nnx.Module):
    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype):
        c = config
        self.gate_up = Linear((2, c.intermediate_size), c.hidden_size, c.mlp_bias, rngs=rngs, dtype=dtype)
        self.down = Linear((c.hidden_size,), c.intermediate_size, c.mlp_bias, rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        both = self.gate_up(x)  # [B, T, 2, F]
        return self.down(jax.nn.silu(both[:, :, 0]) * both[:, :, 1])


class Layer(nnx.Module):
    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, config.hidden_size, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, rngs=rngs, dtype=dtype)

    def __call__(self, x, block: Block, keys, values, sharding, run: tuple[bool, bool]):
        """``run`` says whether attention and MLP take part. A part that is left out costs nothing."""
        if run[0]:
            attended, keys, values = self.attention(self.attention_norm(x), block, keys, values, sharding)
            x = x + attended
        return x + self.mlp(self.mlp_norm(x)) if run[1] else x, keys, values


def _traced_once() -> Callable:
    """A function that calls a split layer, and is traced once for all layers of one shape.

    Otherwise JAX would trace each of them, which takes a small model longer than loading its weights. XLA inlines the
    calls, so the compiled program stays the same. The function serves one call of the model only: the trace depends on
    the mesh and the environment too, not on the arguments alone.
    """

    def call(graphdef, weights, x, block, keys, values, sharding, run):
        return nnx.merge(graphdef, weights)(x, block, keys, values, sharding, run)

    return jax.jit(call, static_argnames=("graphdef", "sharding", "run"))


class Llama(nnx.Module):
    """A Llama-family decoder.

    Args:
      config: its shape.
      rngs: initialises the weights at random (tests, training); converted weights replace them.
      dtype: of the weights, the activations and the cache.
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
          tokens: i32[B, T]; None with ``embedded``.
          cache: the T new entries are written from each row's length on; ``lengths + T <= capacity`` is the
            caller's to guarantee.
          positions: i32[B, T] rotary positions; by default they follow the row's length.
          mask: bool[B, T, S], which cache slots each token sees; by default those at or before its own slot.
          with_logits: False skips the output head.
          run: for each layer, whether its attention and its MLP take part (static); all do by default.
          taps: after how many layers to return the hidden states as well (static); 0 is the embedding.
          embedded: [B, T, H], what the first layer gets in place of tokens' embeddings.
          whole: on a mesh, gives an array to every device in full. Left to itself the partitioner would keep hidden
            states in parts, which doubles the messages, and logits too, over which each pass of a filter would talk.
        """
        x = dequantize(self.embed[...][tokens], self.norm.weight[...].dtype) if embedded is None else embedded
        x = whole(x)  # [B, T, H]
        angles = rope.cos_sin(self.config, positions_of(cache, x.shape[1], positions))
        block = Block(cache.lengths, angles, mask)
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
    """The module's graph definition and its parameter tree as shapes: nested dicts, list indices as strings."""
    return modules.structure(Llama, config)


def merge(config: LlamaConfig, params: dict) -> Llama:
    """The module over a plain parameter tree; call it inside ``jit``, where building it costs nothing at run time."""
    return modules.merge(Llama, config, params)
