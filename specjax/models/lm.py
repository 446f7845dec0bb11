"""A language model as users hold it: configuration, weights and tokenizer in one pytree."""

import dataclasses
import math
from typing import Any, cast

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.models import llama, quantized
from specjax.models.cache import KVCache, alloc
from specjax.models.config import LlamaConfig
from specjax.models.model import Output


@dataclasses.dataclass(frozen=True, eq=False)  # a model equals itself alone: arrays have no one answer to ==
class LM:
    """A Llama-family model.

    A pytree: ``params`` are its leaves and ``config`` is static, so two models of one shape share compiled programs.
    The tokenizer stays on the host: it is dropped where the model enters ``jit``.
    """

    config: LlamaConfig
    params: dict  # nested dict of [out, in] arrays (or Quantized): see specjax.models.llama.structure
    tokenizer: Any | None = None  # specjax.tokenizer.Tokenizer
    kv_dtype: str | None = None  # "int8": how keys and values are stored; None: as they are computed
    cache_sharding: NamedSharding | None = None  # of keys and values, for a model on a mesh (specjax.parallel)

    @property
    def vocab_size(self) -> int:
        """V, the number of rows of the output head."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        """The longest text, in tokens, that the model reads."""
        return self.config.max_position_embeddings

    @property
    def hidden_size(self) -> int:
        """H, the size of the hidden states."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        """Layers, and so the highest number that ``taps`` may name."""
        return self.config.num_hidden_layers

    @property
    def dtype(self):
        """Of activations, of the cache unless ``kv_dtype`` says otherwise, and of every weight that isn't quantised."""
        return self.params["norm"]["weight"].dtype

    @property
    def mesh(self) -> Mesh | None:
        """The devices of a model that lives on several."""
        return None if self.cache_sharding is None else cast(Mesh, self.cache_sharding.mesh)

    @property
    def in_parts(self) -> bool:
        """Whether no device holds the whole model."""
        return self.cache_sharding is not None and bool(self.cache_sharding.spec)

    def __repr__(self) -> str:
        """Its shape, size and storage in two lines."""
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
        """One block of tokens on top of the cached prefixes; arguments as of :class:`specjax.models.llama.Llama`."""
        module = llama.merge(self.config, self.params)
        return module(tokens, cache, positions, mask, with_logits, run, taps, embedded, self._whole)

    def _whole(self, x: jax.Array) -> jax.Array:
        """An array in full on every device of the mesh, if there is one."""
        return x if self.mesh is None else lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec()))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embeddings of tokens i32[...], as the first layer gets them. -> [..., H]."""
        table = self.params["embed"]
        if not self.in_parts:
            return quantized.dequantize(table[tokens], self.dtype)
        own = cast(NamedSharding, self.cache_sharding)
        # Left to the partitioner a draft loop would fetch the whole table, and products on its rows would be cut.
        columns = PartitionSpec(None, own.spec[1])
        cut = jax.tree.map(lambda x: PartitionSpec(*columns[: x.ndim]), table)
        return self._whole(jax.shard_map(
            lambda table, tokens: quantized.dequantize(table[tokens], self.dtype),
            mesh=own.mesh,
            in_specs=(cut, PartitionSpec()),
            out_specs=PartitionSpec(*(None,) * tokens.ndim, own.spec[1]),
        )(table, tokens))  # fmt: skip

    def head_table(self) -> jax.Array:
        """The output head's rows, [V, H]; the embedding's where they are tied."""
        table = self.params["embed" if self.config.tie_word_embeddings else "lm_head"]
        return quantized.dequantize(table, self.dtype)

    def quantize(self, kind: str) -> "LM":
        """This model with its matrices in eight bits, made where they are, one at a time; this one stays as it is.

        Args:
          kind: "int8" or "fp8", as of :func:`specjax.checkpoints.load`, which never holds the unquantised model.

        Raises:
          ValueError: unknown kind, or quantised already.
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
    LM, data_fields=["params"], meta_fields=["config", "kv_dtype", "cache_sharding"], drop_fields=["tokenizer"]
)
