"""Retrieval: propose what followed the longest match of the text's end in a corpus (REST, He et al. 2024)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.arrays import span
from specjax.decode.types import DecodeState, Draft, Plan
from specjax.drafting.base import OftenSilent
from specjax.drafting.datastore import Datastore
from specjax.models.cache import KVCache
from specjax.models.model import Model

FANOUT = 16  # places probed at a time: on a GPU a search step is bound by its latency, not by its reads


@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no one answer to ==
class Retrieval(OftenSilent):
    """Looks the last ``retrieval_max`` down to ``retrieval_min`` tokens up on the device. Made by :meth:`over`.

    Of the places that match, up to ``candidates`` evenly spread ones vote on each next token, those alone that agreed
    with the tokens chosen before. The candidate texts are so merged to one chain.
    """

    tokens: jax.Array = dataclasses.field(repr=False)  # i32[N]
    order: jax.Array = dataclasses.field(repr=False)  # i32[N]
    highest: np.ndarray  # i32[] the largest token id, kept on the host: a request is checked against it
    retrieval_max: int = 8
    retrieval_min: int = 2
    candidates: int = 32

    @classmethod
    def over(
        cls, datastore: Datastore, retrieval_max: int = 8, retrieval_min: int = 2, candidates: int = 32
    ) -> "Retrieval":
        """Puts a datastore on the device.

        Raises:
          ValueError: unless 1 <= retrieval_min <= retrieval_max <= Datastore.DEPTH and candidates >= 1.
        """
        if not (1 <= retrieval_min <= retrieval_max <= Datastore.DEPTH and candidates >= 1):
            raise ValueError(
                f"retrieval needs 1 <= retrieval_min <= retrieval_max <= {Datastore.DEPTH} and candidates >= 1, got "
                f"{retrieval_min!r}, {retrieval_max!r} and {candidates!r}"
            )
        tokens, order = jnp.asarray(np.asarray(datastore.tokens)), jnp.asarray(np.asarray(datastore.order))
        highest = np.asarray(np.max(datastore.tokens))
        return cls(tokens, order, highest, retrieval_max, retrieval_min, candidates)

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        vocab = target.vocab_size
        if self.highest >= vocab:
            raise ValueError(
                f"the datastore has token id {self.highest}, outside the target's vocabulary of {vocab}: "
                "it was built with another tokenizer"
            )
        return super().plan(target, num_speculative_tokens)._replace(gives_probs=False)

    def propose(
        self, target: Model, own: tuple, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, tuple, KVCache]:
        del target, keys
        sizes = jnp.arange(self.retrieval_max, self.retrieval_min - 1, -1, dtype=jnp.int32)  # the longest first

        def row(tokens, length):
            starts = length - sizes
            queries = tokens[jnp.maximum(starts, 0)[:, None] + span(self.retrieval_max)]  # [M, retrieval_max]
            low, high = jax.vmap(self._range)(queries, sizes)  # [M]
            found = (high > low) & (starts >= 0)
            best = jnp.argmax(found)
            chain, valid = self._vote(low[best], high[best], sizes[best], num_speculative_tokens)
            return chain, valid & found[best]

        tokens, valid = jax.vmap(row)(state.tokens, state.lengths)
        return Draft(tokens, valid, None), own, state.cache

    def _range(self, query: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which of the sorted suffixes begin with the first ``size`` of the query's tokens: [low, high)."""
        index = span(self.retrieval_max)
        steps = jnp.arange(1, FANOUT, dtype=jnp.int32)
        total = self.order.shape[0]

        def before(count, inclusive):
            """Whether the suffix at rank count - 1 sorts before the query, or within it if ``inclusive``."""
            place = self.order[jnp.minimum(count, total) - 1]
            text = self.tokens.at[place[:, None] + index].get(mode="fill", fill_value=-1)  # [FANOUT - 1, max]
            differs = (text != query[None]) & (index < size)
            first = jnp.argmax(differs, axis=1)
            less = jnp.take_along_axis(text, first[:, None], axis=1)[:, 0] < query[first]
            return jnp.where(jnp.any(differs, axis=1), less, inclusive) & (count <= total)

        low = high = jnp.int32(0)
        level = 1
        while level * FANOUT <= total:
            level *= FANOUT
        while level:  # one digit of both ranks a pass
            low += level * jnp.sum(before(low + level * steps, False), dtype=jnp.int32)
            high += level * jnp.sum(before(high + level * steps, True), dtype=jnp.int32)
            level //= FANOUT
        return low, high

    def _vote(self, low: jax.Array, high: jax.Array, size: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
        """The chain of most frequent continuations, i32[K], and bool[K]: it ends where a text of the corpus does."""
        spread = jnp.arange(self.candidates, dtype=jnp.int32) * jnp.maximum(high - low, 1) // self.candidates
        alive = jnp.concatenate([jnp.array([True]), spread[1:] != spread[:-1]])  # each place votes once
        place = self.order[jnp.minimum(low + spread, self.order.shape[0] - 1)]
        index = (place + size)[:, None] + span(length)
        texts = self.tokens.at[index].get(mode="fill", fill_value=-1)  # [candidates, K]
        chain = []
        for column in texts.T:
            agree = (column[:, None] == column[None]) & alive[None]
            votes = jnp.where(alive & (column >= 0), jnp.sum(agree, axis=1, dtype=jnp.int32), 0)
            chain.append(jnp.where(jnp.max(votes) > 0, column[jnp.argmax(votes)], -1))
            alive &= column == chain[-1]
        tokens = jnp.stack(chain)
        valid = jnp.cumprod(tokens >= 0).astype(bool)
        return jnp.maximum(tokens, 0), valid


jax.tree_util.register_dataclass(
    Retrieval,
    data_fields=["tokens", "order", "highest"],
    meta_fields=["retrieval_max", "retrieval_min", "candidates"],
)
