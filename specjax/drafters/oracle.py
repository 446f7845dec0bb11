"""Replaying known continuations: the upper bound for any drafter, and a script for tests."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.types import DecodeState, Draft, Plan
from specjax.drafting.base import OftenSilent
from specjax.models.cache import KVCache
from specjax.models.model import Model


@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no one answer to ==
class Oracle(OftenSilent):
    """Proposes what follows in the first known text that begins with all of a row's tokens. Made by :meth:`of`."""

    tokens: jax.Array = dataclasses.field(repr=False)  # i32[N, M]
    lengths: jax.Array = dataclasses.field(repr=False)  # i32[N]

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]]) -> "Oracle":
        """From whole texts as token ids, prompts included.

        Raises:
          ValueError: if there is none.
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
