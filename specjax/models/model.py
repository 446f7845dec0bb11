"""What decoding needs of a model. A family of models is a class that has these."""

from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from specjax.models.cache import KVCache


class Output(NamedTuple):
    """What one call of the model returns."""

    logits: jax.Array  # f32[B, T, V]; V = 0 when not asked for
    hidden: jax.Array  # [B, T, H], after the last norm
    cache: KVCache  # T entries written past each row's length; the lengths are as they were
    taps: dict[int, jax.Array]  # [B, T, H] after so many layers, before any norm; those that were asked for


class Model(Protocol):
    """A language model with its weights: a pytree whose leaves are the weights, so that it may be an argument of jit.

    :class:`specjax.models.lm.LM` is the one that specjax has; docs/add-a-model.md says how to write another.
    """

    @property
    def config(self) -> Any:
        """The family's own configuration; static."""
        ...

    @property
    def tokenizer(self) -> Any | None:
        """A ``specjax.text.tokenizer.Tokenizer``; dropped where the model enters jit."""
        ...

    @property
    def vocab_size(self) -> int:
        """V, the number of rows of the output head."""
        ...

    @property
    def max_positions(self) -> int:
        """The longest text, in tokens, that the model reads."""
        ...

    @property
    def hidden_size(self) -> int:
        """H, the size of the hidden states."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers, and so the highest number that ``taps`` may name."""
        ...

    @property
    def dtype(self) -> Any:
        """The type of the hidden states."""
        ...

    @property
    def mesh(self) -> Mesh | None:
        """The devices of a model that lives on several; None: one device."""
        ...

    @property
    def in_parts(self) -> bool:
        """Whether no device holds the whole model."""
        ...

    def alloc_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for ``batch`` rows of up to ``capacity`` tokens."""
        ...

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
        """Runs a block of tokens on top of each row's cached prefix, as :meth:`specjax.models.llama.Llama.__call__`."""
        ...

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embeddings of tokens i32[...], as the first layer gets them. -> [..., H]."""
        ...

    def head_table(self) -> jax.Array:
        """The output head's rows, [V, H]."""
        ...
