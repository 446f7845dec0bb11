"""A language model as users hold it: configuration, weights and tokenizer in one pytree."""

import dataclasses
from typing import Any

import jax

from specjax.config import LlamaConfig
from specjax.models import llama
from specjax.models.cache import KVCache, alloc
from specjax.models.llama import Output


@dataclasses.dataclass(frozen=True)
class LM:
    """A Llama-family model.

    A pytree: ``params`` are its leaves and ``config`` is static, so two models of one shape share compiled programs.
    The tokenizer stays on the host: it is dropped where the model enters ``jit``.
    """

    config: LlamaConfig
    params: dict  # nested dict of [out, in] arrays: see specjax.models.llama.structure
    tokenizer: Any | None = None  # specjax.tokenizer.Tokenizer

    @property
    def dtype(self):
        """Of weights, activations and cache."""
        return self.params["embed"].dtype

    def __call__(
        self,
        tokens: jax.Array,
        cache: KVCache,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
        with_logits: bool = True,
        run: tuple[tuple[bool, bool], ...] | None = None,
    ) -> Output:
        """One block of tokens on top of the cached prefixes; arguments as of :class:`specjax.models.llama.Llama`."""
        return llama.merge(self.config, self.params)(tokens, cache, positions, mask, with_logits, run)

    def alloc_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache of this model's shape and dtype."""
        return alloc(self.config, batch, capacity, self.dtype)


jax.tree_util.register_dataclass(LM, data_fields=["params"], meta_fields=["config"], drop_fields=["tokenizer"])
