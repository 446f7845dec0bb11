"""T5 and Flan-T5 as Flax nnx modules (Raffel et al. 2020, section 2.1): an encoder, and a decoder over its output.

Logits follow Hugging Face's ``T5ForConditionalGeneration``. A row's tokens are its source, the decoder's first token
and the text, and the row's cache has a slot for each:

    slots     0 .. S-1                                   S ..
    tokens    the source                                 the first token and the text
    entries   keys and values of cross-attention         keys and values of self-attention

The encoder runs once, in ``read``, and writes the source's entries. From then on the decoder is called as any decoder
is. Its self-attention sees the slots from S on, and its cross-attention the slots before S.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.decode.arrays import span
from specjax.models import attention
from specjax.models import cache as kv
from specjax.models.attention import Block
from specjax.models.cache import KVCache
from specjax.models.llama import Linear, RMSNorm
from specjax.models.model import Output
from specjax.models.stack import Stack, rows_of, traced_once
from specjax.models.t5_config import T5Config

UNSCALED = attention.Score(scale=1.0)
ACTIVATIONS = {"relu": jax.nn.relu, "gated-gelu": jax.nn.gelu, "gated-silu": jax.nn.silu}  # jax's gelu is the tanh form


class Blocks(NamedTuple):
    """What the tokens of a block see, of the text and of the source. All layers of the decoder share it."""

    # Where the block's own entries go, and which slots of the text its tokens see.
    text: Block
    # bool[B, 1, S] The slots of the source.
    source: jax.Array


class Attention(nnx.Module):
    """Self-attention. The rows of ``qkv`` are ordered by head: its query, then its key, then its value."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs, dtype):
        c = config
        self.config = c
        self.qkv = Linear((c.num_attention_heads, 3 * c.head_dim), c.hidden_size, False, rngs=rngs, dtype=dtype)
        self.o = Linear((c.hidden_size,), c.num_attention_heads * c.head_dim, False, rngs=rngs, dtype=dtype)

    def __call__(self, x, block: Block, keys, values, sharding):
        """x [B, T, H] -> [B, T, H], and the new keys and values. See :func:`specjax.models.attention.attend`."""
        c = self.config
        qkv = self.qkv(x).reshape(*x.shape[:2], c.num_attention_heads, 3, c.head_dim)
        out, keys, values = attention.attend(qkv, block, keys, values, sharding, UNSCALED)
        return self.o(out), keys, values


class CrossAttention(nnx.Module):
    """Attention of the text to the source. The rows of ``kv`` are ordered by head: its key, then its value."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs, dtype):
        c = config
        self.config = c
        self.q = Linear((c.num_attention_heads, c.head_dim), c.hidden_size, False, rngs=rngs, dtype=dtype)
        self.kv = Linear((c.num_attention_heads, 2 * c.head_dim), c.hidden_size, False, rngs=rngs, dtype=dtype)
        self.o = Linear((c.hidden_size,), c.num_attention_heads * c.head_dim, False, rngs=rngs, dtype=dtype)

    def __call__(self, x, blocks: Blocks, keys, values) -> jax.Array:
        """x [B, T, H] -> [B, T, H]."""
        q = self.q(x)[:, :, :, None]  # [B, T, heads, 1, D]
        return self.o(attention.mix(q, keys, values, blocks.source, None, blocks.text.table, UNSCALED))

    def entries(self, source: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The keys and the values of the encoder's output [B, S, H], each [B, heads, S, D]."""
        c = self.config
        both = self.kv(source).reshape(*source.shape[:2], c.num_attention_heads, 2, c.head_dim)
        keys, values = kv.finite_values(both[:, :, :, 0], both[:, :, :, 1])
        return keys.swapaxes(1, 2), values.swapaxes(1, 2)


class MLP(nnx.Module):
    """down(relu(up(x))), or with a gate down(act(gate(x)) * up(x)). Gate and up are one fused product."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs, dtype):
        c = config
        self.config = c
        if c.gated:
            self.gate_up = Linear((2, c.intermediate_size), c.hidden_size, False, rngs=rngs, dtype=dtype)
        else:
            self.up = Linear((c.intermediate_size,), c.hidden_size, False, rngs=rngs, dtype=dtype)
        self.down = Linear((c.hidden_size,), c.intermediate_size, False, rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        act = ACTIVATIONS[self.config.feed_forward_proj]
        if not self.config.gated:
            return self.down(act(self.up(x)))
        both = self.gate_up(x)  # [B, T, 2, F]
        return self.down(act(both[:, :, 0]) * both[:, :, 1])


class EncoderLayer(nnx.Module):
    """Self-attention, then MLP. Each reads the norm of the hidden states, and its output is added to them."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs, dtype):
        self.attention_norm, self.mlp_norm = (_norm(config, dtype) for _ in range(2))
        self.attention = Attention(config, rngs=rngs, dtype=dtype)
        self.mlp = MLP(config, rngs=rngs, dtype=dtype)

    def __call__(self, x, block: Block, keys, values, sharding, run: tuple[bool, bool]):
        """As :class:`specjax.models.llama.Layer`, over entries that no later call reads."""
        del run
        attended, keys, values = self.attention(self.attention_norm(x), block, keys, values, sharding)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), keys, values


class DecoderLayer(nnx.Module):
    """Self-attention, attention to the source, then MLP, as in :class:`EncoderLayer`."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs, dtype):
        self.attention_norm, self.cross_norm, self.mlp_norm = (_norm(config, dtype) for _ in range(3))
        self.attention = Attention(config, rngs=rngs, dtype=dtype)
        self.cross = CrossAttention(config, rngs=rngs, dtype=dtype)
        self.mlp = MLP(config, rngs=rngs, dtype=dtype)

    def __call__(self, x, block: Blocks, keys, values, sharding, run: tuple[bool, bool]):
        """As :class:`specjax.models.llama.Layer`. Both attentions take part, or none."""
        if run[0]:
            attended, keys, values = self.attention(self.attention_norm(x), block.text, keys, values, sharding)
            x = x + attended
            x = x + self.cross(self.cross_norm(x), block, keys, values)
        return x + self.mlp(self.mlp_norm(x)) if run[1] else x, keys, values


class Encoder(nnx.Module):
    """Reads whole sources."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs, dtype):
        c = config
        self.config = c
        self.distance_bias = nnx.Param(jax.random.normal(rngs.params(), (c.num_buckets, c.num_attention_heads), dtype))
        self.layers = nnx.List([EncoderLayer(c, rngs=rngs, dtype=dtype) for _ in range(c.num_encoder_layers)])
        self.norm = _norm(c, dtype)

    def __call__(self, x: jax.Array, ends: jax.Array, sharding) -> jax.Array:
        """Embeddings [B, S, H] of sources of i32[B] ``ends`` tokens -> hidden states [B, S, H] after the last norm."""
        c, (rows, size, _) = self.config, x.shape
        after = span(size) - span(size).T  # i32[S, S], how far each key stands after each query
        bias = bias_of(self.distance_bias[...], buckets(c, both_ways=True), after[None] + c.max_distance)
        mask = jnp.broadcast_to(span(size)[None] < ends[:, None, None], (rows, size, size))
        block = Block(jnp.zeros(rows, jnp.int32), None, mask, bias)
        empty = jnp.zeros((rows, c.num_attention_heads, size, c.head_dim), x.dtype)  # each layer's entries, not kept
        call = traced_once()
        for layer in self.layers:
            x, _, _ = call(*nnx.split(layer), x, block, empty, empty, sharding, (True, True))
        return self.norm(x)


class T5(Stack):
    """A T5. Arguments as of :class:`specjax.models.llama.Llama`. ``layers`` are the decoder's."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs, dtype=jnp.float32):
        c = config
        self.config = c
        table = (c.vocab_size, c.hidden_size)
        self.embed = nnx.Param(jax.random.normal(rngs.params(), table, dtype))
        self.encoder = Encoder(c, rngs=rngs, dtype=dtype)
        self.distance_bias = nnx.Param(jax.random.normal(rngs.params(), (c.num_buckets, c.num_attention_heads), dtype))
        self.layers = nnx.List([DecoderLayer(c, rngs=rngs, dtype=dtype) for _ in range(c.num_hidden_layers)])
        self.norm = _norm(c, dtype)
        if not c.tie_word_embeddings:
            self.lm_head = nnx.Param(jax.random.normal(rngs.params(), table, dtype) * c.hidden_size**-0.5)

    def read(
        self,
        tokens: jax.Array,
        cache: KVCache,
        ends: jax.Array,
        taps: tuple[int, ...] = (),
        whole: Callable[[jax.Array], jax.Array] = lambda x: x,
    ) -> Output:
        del taps  # a drafter that asks for taps refuses a model with an encoder
        x = whole(rows_of(self.embed[...], tokens, self.config, self.norm.weight[...].dtype))
        source = whole(self.encoder(x, ends, cache.sharding))  # [B, S, H]
        keys, values = [], []
        for layer, *buffers in zip(self.layers, cache.keys, cache.values, strict=True):
            both = zip(buffers, layer.cross.entries(source), strict=True)
            layer_keys, layer_values = (kv.write(old, new, cache.lengths, cache.table) for old, new in both)
            keys.append(layer_keys)
            values.append(layer_values)
        cache = cache.replace(keys=tuple(keys), values=tuple(values), source=ends)
        return Output(jnp.zeros((*x.shape[:2], 0), jnp.float32), source, cache, {})

    def blocks(self, cache: KVCache, positions: jax.Array, mask: jax.Array | None) -> list[Blocks]:
        slots = span(cache.capacity)[None]  # [1, 1, S]
        if mask is None:
            behind = (cache.lengths[:, None] + span(positions.shape[1]))[..., None] - slots  # [B, T, S]
            mask = behind >= 0
        else:  # of a tree, slots are not positions, and a distance is the number of visible tokens in between
            behind = jnp.cumsum(mask[..., ::-1], axis=-1, dtype=jnp.int32)[..., ::-1] - 1
        bias = bias_of(self.distance_bias[...], buckets(self.config, both_ways=False), behind)
        in_source = slots < cache.first[:, None, None]  # [B, 1, S]
        text = Block(cache.lengths, None, mask & ~in_source, bias, cache.table)
        return [Blocks(text, in_source)] * len(self.layers)

    def head(self, hidden: jax.Array) -> jax.Array:
        return super().head(hidden * self.config.hidden_size**-0.5 if self.config.scaled_head else hidden)


def _norm(config: T5Config, dtype) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.layer_norm_epsilon, dtype=dtype)


def bias_of(table: jax.Array, bucket: np.ndarray, index: jax.Array) -> jax.Array:
    """The bias of each head on each score.

    Args:
      table: [num_buckets, heads].
      bucket: i32[N], from :func:`buckets`.
      index: i32[R, T, S], for each query and key a place in ``bucket``. Places outside of it count as its ends.

    Returns:
      f32[R, heads, T, S].
    """
    by_index = table.astype(jnp.float32)[bucket].T  # [heads, N]
    return jnp.take(by_index, index, axis=1, mode="clip").swapaxes(0, 1)


def buckets(config: T5Config, both_ways: bool) -> np.ndarray:
    """The bucket of each distance between a query and a key: half of the buckets are exact, half are logarithmic.

    Args:
      config: the model's shape.
      both_ways: False: of keys 0 to ``max_distance`` tokens before the query, i32[max_distance + 1]. True: of keys
        -max_distance to ``max_distance`` tokens after it. Keys after it have the upper half of the buckets.

    The arithmetic is float32, because rounding decides the bucket of some distances.
    """
    count, distance = config.num_buckets, np.arange(config.max_distance + 1, dtype=np.float32)
    count = count // 2 if both_ways else count
    exact = count // 2
    scale = np.float32(math.log(config.max_distance / exact))
    far = np.log(np.maximum(distance, 1) / np.float32(exact)) / scale * np.float32(count - exact)
    found = np.where(distance < exact, distance, np.minimum(exact + far.astype(np.int32), count - 1)).astype(np.int32)
    return np.concatenate([found[:0:-1], [0], found[1:] + count]).astype(np.int32) if both_ways else found
