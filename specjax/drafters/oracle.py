"""A drafter that knows the continuation: the upper bound of every drafter, and a source of chosen drafts for tests."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.types import DecodeState, Draft, Plan
from specjax.drafting.base import OftenSilent
from specjax.models.cache import KVCache
from specjax.models.model import Model


@dataclasses.dataclass(frozen=True, eq=False)  # == of two arrays is an array, not one answer
class Oracle(OftenSilent):
    """Proposes the continuation in the first known text that begins with all of a row's tokens.

    A row whose text begins no known text proposes nothing. :meth:`of` makes an oracle of N texts.
    """

    # i32[N, M] The known texts, prompts included, padded with -1.
    tokens: jax.Array = dataclasses.field(repr=False)
    # i32[N] The number of tokens of each known text.
    lengths: jax.Array = dataclasses.field(repr=False)

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]]) -> "Oracle":
        """Makes an oracle of known texts.

        Args:
          texts: whole texts as lists of token ids, prompts included.

        Raises:
          ValueError: there is no text.
        """
        if not len(texts):
            raise ValueError("an oracle needs at least one known text, got none")
        lengths = np.array([len(t) for t in texts], np.int32)
        tokens = np.full((len(texts), max(lengths.max(), 1)), -1, np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        return cls(jnp.asarray(tokens), jnp.asarray(lengths))

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        return super().plan(target, num_speculative_tokens)._replace(gives_probs=False)

    def propose(
        self, target: Model, own: tuple, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, tuple, KVCache]:
        del target, keys
        size = max(self.tokens.shape[1], state.tokens.shape[1]) + num_speculative_tokens
        known = jnp.pad(self.tokens, ((0, 0), (0, size - self.tokens.shape[1])))
        index = jnp.arange(size, dtype=jnp.int32)

        def row(tokens, length):
            tokens = jnp.pad(tokens, (0, size - tokens.shape[0]))
            agrees = jnp.all((known == tokens[None]) | (index >= length)[None], axis=1) & (self.lengths >= length)
            which = jnp.argmax(agrees)
            positions = length + jnp.arange(num_speculative_tokens, dtype=jnp.int32)
            return known[which, positions], agrees[which] & (positions < self.lengths[which])

        tokens, valid = jax.vmap(row)(state.tokens, state.lengths)
        return Draft(tokens, valid, None), own, state.cache


jax.tree_util.register_dataclass(Oracle, data_fields=["tokens", "lengths"], meta_fields=[])
