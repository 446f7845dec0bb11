"""The interface of a model: all that decoding needs. Each family of models is one class that has these members."""

from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from specjax.models.cache import KVCache


class Output(NamedTuple):
    """The result of one call of the model."""

    # f32[B, T, V] The logits after each token. V is 0 if they were not asked for.
    logits: jax.Array
    # [B, T, H] The hidden states after the last norm.
    hidden: jax.Array
    # The cache with T new entries past each row's length. The lengths are unchanged.
    cache: KVCache
    # [B, T, H] The hidden states after each number of layers that was asked for, before any norm. 0 is the embedding.
    taps: dict[int, jax.Array]


def check_no_encoder(lm: "Model", who: str) -> None:
    """Raises ValueError, which says for whom, if a model has an encoder."""
    if lm.has_encoder:
        raise ValueError(
            f"{who} is for decoders alone, and this model has an encoder; docs/models.md says what serves such a model"
        )


class Model(Protocol):
    """A language model with its weights. It is a pytree whose leaves are the weights, so jit takes it as an argument.

    specjax has one such class, :class:`specjax.models.lm.LM`. docs/add-a-model.md says how to write another.
    """

    @property
    def config(self) -> Any:
        """The configuration of this family of models; static."""
        ...

    @property
    def tokenizer(self) -> Any | None:
        """A ``specjax.text.tokenizer.Tokenizer``. It is dropped where the model enters jit. None: no tokenizer."""
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
    def has_encoder(self) -> bool:
        """Whether an encoder reads each prompt, which is then the source of a text: all tokens but the decoder's first.

        A row's tokens are its source, the decoder's first token, and the text.
        """
        ...

    @property
    def hidden_size(self) -> int:
        """H, the size of the hidden states."""
        ...

    @property
    def num_layers(self) -> int:
        """The number of layers, which is also the highest number that ``taps`` may name."""
        ...

    @property
    def dtype(self) -> Any:
        """The dtype of the hidden states."""
        ...

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of a model that lives on several devices; None: the model is on one device."""
        ...

    @property
    def in_parts(self) -> bool:
        """Whether the weights are cut, so that no device holds all of them."""
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
        """Runs a block of tokens on top of each row's cached prefix: :meth:`specjax.models.stack.Stack.__call__`."""
        ...

    def read(self, tokens: jax.Array, cache: KVCache, ends: jax.Array, taps: tuple[int, ...] = ()) -> Output:
        """Reads a block of each prompt: :meth:`specjax.models.stack.Stack.read`."""
        ...

    def embed(self, tokens: jax.Array) -> jax.Array:
        """The embeddings of tokens i32[...], as the first layer reads them. -> [..., H]."""
        ...

    def head_table(self) -> jax.Array:
        """The rows of the output head, [V, H]."""
        ...
