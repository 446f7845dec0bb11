"""What decoders of all families share: an embedding, unrolled layers over one cache, and an output head.

Layers are unrolled, because XLA then reads each weight once, in place (see docs/performance.md).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.decode.arrays import span
from specjax.models.cache import KVCache
from specjax.models.model import Output
from specjax.models.product import product
from specjax.models.quantized import Quantized, dequantize


def positions_of(cache: KVCache, size: int, given: jax.Array | None) -> jax.Array:
    """Positions i32[B, T] of a block of ``size`` tokens: ``given``, or else the numbers from each row's length on."""
    return cache.lengths[:, None] + span(size) if given is None else given


def rows_of(table: jax.Array | Quantized, tokens: jax.Array | None, config: Any, dtype) -> jax.Array:
    """The embeddings of tokens i32[...], from the embedding table [V, H] and its scale. -> [..., H]."""
    x = dequantize(table[tokens], dtype)  # type: ignore[index]
    return x if config.embedding_scale is None else x * jnp.asarray(config.embedding_scale, dtype)


def traced_once() -> Callable:
    """A function that calls a layer, given as graph definition and weights. All layers of one shape share one trace.

    Without it JAX would trace every layer, which takes longer than loading the weights of a small model. XLA inlines
    the calls, so the compiled program is the same. Each call of the model makes a new function, because the trace
    depends not only on the arguments but also on the mesh and the environment.
    """

    def call(graphdef, weights, x, block, keys, values, sharding, run):
        return nnx.merge(graphdef, weights)(x, block, keys, values, sharding, run)

    return jax.jit(call, static_argnames=("graphdef", "sharding", "run"))


class Stack(nnx.Module):
    """A decoder. A family is a subclass that makes ``embed``, ``layers``, ``norm`` and, if untied, ``lm_head``."""

    config: Any
    embed: nnx.Param  # [V, H]
    layers: nnx.List
    norm: Any
    lm_head: nnx.Param  # [V, H]

    def blocks(self, cache: KVCache, positions: jax.Array, mask: jax.Array | None) -> Sequence[Any]:
        """The ``Block`` of each layer, or what the family's layers take for it, for tokens at positions i32[B, T]."""
        raise NotImplementedError

    def placed(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """The first layer's input, from embeddings [B, T, H] and positions i32[B, T]."""
        del positions
        return x

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
          positions: i32[B, T] positions; None: the row's length, and on from there.
          mask: bool[B, T, S], the cache slots that each token sees; None: every slot up to the token's own. Layers with
            a window see only the last of these slots.
          with_logits: False skips the output head, and the logits are [B, T, 0].
          run: for each layer, whether its attention and whether its MLP take part (static); None: all do.
          taps: numbers of layers after which the hidden states are returned too (static); 0 is the first layer's input.
          embedded: [B, T, H], in place of the tokens' embeddings.
          whole: on a mesh, gives every device the whole of an array. Without it the partitioner would keep hidden
            states in parts, which doubles the messages between devices. The logits would be in parts too, and each
            pass of a sampling filter would then send messages.
        """
        x = rows_of(self.embed[...], tokens, self.config, self.norm.weight[...].dtype) if embedded is None else embedded
        positions = positions_of(cache, x.shape[1], positions)
        x = whole(self.placed(x, positions))  # [B, T, H]
        blocks = self.blocks(cache, positions, mask)
        keys, values, hidden_after = [], [], [x]
        run = ((True, True),) * len(self.layers) if run is None else run
        call = traced_once()
        for layer, block, parts, *buffers in zip(self.layers, blocks, run, cache.keys, cache.values, strict=True):
            x, layer_keys, layer_values = call(*nnx.split(layer), x, block, *buffers, cache.sharding, parts)
            keys.append(layer_keys)
            values.append(layer_values)
            hidden_after.append(x)
        hidden = whole(self.norm(x))
        logits = whole(self.head(hidden)) if with_logits else jnp.zeros((*x.shape[:2], 0), jnp.float32)
        cache = cache.replace(keys=tuple(keys), values=tuple(values))
        return Output(logits, hidden, cache, {after: whole(hidden_after[after]) for after in taps})

    def read(
        self,
        tokens: jax.Array,
        cache: KVCache,
        ends: jax.Array,
        taps: tuple[int, ...] = (),
        whole: Callable[[jax.Array], jax.Array] = lambda x: x,
    ) -> Output:
        """Reads a block of each prompt. A decoder reads it as any text, an encoder otherwise.

        Args:
          tokens: i32[B, T]. What comes from a row's end on is padding.
          cache: as in a call. With an encoder the lengths are 0: the block must hold the whole source.
          ends: i32[B], the number of prompt tokens that are read, in this block and before: all but the last.
          taps, whole: as in a call.

        Returns:
          As of a call, without logits.
        """
        del ends
        return self(tokens, cache, with_logits=False, taps=taps, whole=whole)

    def head(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [B, T, H] to float32 logits [B, T, V]."""
        table = self.embed if self.config.tie_word_embeddings else self.lm_head
        return product(hidden, table[...], jnp.float32)
