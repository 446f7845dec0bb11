"""A language model as users hold it: configuration, weights and tokenizer in one pytree."""

import dataclasses
import math
from typing import Any, cast

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.models import families, quantized
from specjax.models.axes import fitted, of_rows
from specjax.models.cache import KVCache, alloc
from specjax.models.model import Output
from specjax.models.stack import rows_of


@dataclasses.dataclass(frozen=True, eq=False)  # a model equals only itself: == of arrays gives no single answer
class LM:
    """A language model of any family of :mod:`specjax.models.families`.

    The model is a pytree. ``params`` holds the leaves, all else is static, so two models of one shape share compiled
    programs. The tokenizer and the name stay on the host: they are dropped where the model enters
    ``jit``.
    """

    # Shape and constants: a specjax.models.configs.ModelConfig.
    config: Any
    # The weights: nested dicts of [out, in] arrays or Quantized, as specjax.models.families.structure describes them.
    params: dict
    # A specjax.text.tokenizer.Tokenizer. None: the model has no tokenizer, so prompts are token ids.
    tokenizer: Any | None = None
    # The type in which keys and values are stored: "int8". None: the dtype in which they are computed.
    kv_dtype: str | None = None
    # How keys and values lie on the model's mesh (specjax.parallel). None: the model is on one device.
    cache_sharding: NamedSharding | None = None
    # The name by which the model was loaded. None: it was made in another way.
    name: str | None = None

    @property
    def vocab_size(self) -> int:
        """V, the number of rows of the output head."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        """The longest text, in tokens, that the model reads."""
        return self.config.max_position_embeddings

    @property
    def has_encoder(self) -> bool:
        """Whether an encoder reads each prompt, which is then the source of a text."""
        return bool(self.config.start_ids)

    @property
    def hidden_size(self) -> int:
        """H, the size of the hidden states."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        """The number of layers, which is also the highest number that ``taps`` may name."""
        return self.config.num_hidden_layers

    @property
    def dtype(self):
        """The dtype of activations, of weights that aren't quantised, and of the cache if ``kv_dtype`` is None."""
        return self.params["norm"]["weight"].dtype

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of a model that lives on several devices; None: the model is on one device."""
        return None if self.cache_sharding is None else cast(Mesh, self.cache_sharding.mesh)

    @property
    def in_parts(self) -> bool:
        """Whether the weights are cut, so that no device holds all of them."""
        return self.cache_sharding is not None and len(self.cache_sharding.spec) > 1

    def __repr__(self) -> str:
        """The model's shape, size and storage in two lines."""
        c, leaves = self.config, jax.tree.leaves(self.params, is_leaf=quantized.is_quantized)
        count = sum(math.prod(leaf.shape) for leaf in leaves)
        weights = quantized.kind_of(self.params) or self.dtype
        devices = "one device" if self.mesh is None else f"{self.mesh.size} devices"
        return (
            f"LM({c.num_hidden_layers} layers of size {c.hidden_size}, vocabulary of {c.vocab_size}, context of "
            f"{c.max_position_embeddings},\n   {count:,} weights in {weights}, cache in {self.kv_dtype or self.dtype}, "
            f"{'no' if self.tokenizer is None else 'a'} tokenizer, on {devices})"
        )

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
    ) -> Output:
        """Runs a block of tokens on top of each row's cached prefix: :meth:`specjax.models.stack.Stack.__call__`."""
        module = families.merge(self.config, self.params)
        return module(tokens, cache, positions, mask, with_logits, run, taps, embedded, self._whole)

    def read(self, tokens: jax.Array, cache: KVCache, ends: jax.Array, taps: tuple[int, ...] = ()) -> Output:
        """Reads a block of each prompt: :meth:`specjax.models.stack.Stack.read`."""
        return families.merge(self.config, self.params).read(tokens, cache, ends, taps, self._whole)

    def _whole(self, x: jax.Array) -> jax.Array:
        """The array [B, ...], each row whole on every device that works on it. On one device, the array as it is."""
        return x if self.mesh is None else lax.with_sharding_constraint(x, fitted(of_rows(self.mesh), len(x)))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """The embeddings of tokens i32[...], as the first layer reads them. -> [..., H]."""
        table = self.params["embed"]
        if not self.in_parts:
            return rows_of(table, tokens, self.config, self.dtype)
        sharding = fitted(cast(NamedSharding, self.cache_sharding), len(tokens))
        rows = PartitionSpec(*sharding.spec[:1])
        # The partitioner would fetch the whole table in a draft loop, and cut the products that read its rows.
        columns = PartitionSpec(None, sharding.spec[1])
        cut = jax.tree.map(lambda x: PartitionSpec(*columns[: x.ndim]), table)
        return self._whole(jax.shard_map(
            lambda table, tokens: rows_of(table, tokens, self.config, self.dtype),
            mesh=sharding.mesh,
            in_specs=(cut, rows),
            out_specs=PartitionSpec(*rows, *(None,) * (tokens.ndim - 1), sharding.spec[1]),
        )(table, tokens))  # fmt: skip

    def head_table(self) -> jax.Array:
        """The rows of the output head, [V, H]. With tied embeddings they are the rows of the embedding."""
        table = self.params["embed" if self.config.tie_word_embeddings else "lm_head"]
        return quantized.dequantize(table, self.dtype)

    def quantize(self, kind: str) -> "LM":
        """A copy of this model with its matrices in eight bits. This model stays as it is.

        Matrices are quantised one at a time, on their devices. ``specjax.load(..., quantize=kind)`` needs less memory,
        because it never holds the whole unquantised model.

        Args:
          kind: "int8" or "fp8"; see :func:`specjax.load`.

        Raises:
          ValueError: the kind is unknown, or the model is quantised already.
        """
        quantized.check_kind("kind", kind, tuple(quantized.KINDS))
        if before := quantized.kind_of(self.params):
            raise ValueError(f"the model holds {before} weights, which can't be quantised again")

        def small(path, leaf):
            return quantized.quantize(leaf, kind) if quantized.is_matrix(self.config, path) else leaf

        return dataclasses.replace(self, params=quantized.map_with_path(small, self.params))

    def alloc_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache of this model's shape, dtype and sharding."""
        return alloc(self.config, batch, capacity, self.kv_dtype or self.dtype, self.cache_sharding)


jax.tree_util.register_dataclass(
    LM, data_fields=["params"], meta_fields=["config", "kv_dtype", "cache_sharding"], drop_fields=["tokenizer", "name"]
)
