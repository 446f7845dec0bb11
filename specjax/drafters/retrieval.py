"""Retrieval: propose the continuation of the text's last tokens in a corpus (REST, He et al. 2024)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.arrays import span
from specjax.decode.numeric import check_counts
from specjax.decode.types import DecodeState, Draft, Plan
from specjax.drafting.base import OftenSilent
from specjax.drafting.datastore import Datastore
from specjax.models.cache import KVCache
from specjax.models.model import Model

# Each step of the search compares the query with FANOUT - 1 places at once. On a GPU the time of a step is latency. The
# latency does not grow with the number of places.
FANOUT = 16


@dataclasses.dataclass(frozen=True, eq=False)  # == of two arrays is an array, not one answer
class Retrieval(OftenSilent):
    """Looks up the last tokens of each row in a corpus, on the device. :meth:`over` makes the drafter of a datastore.

    The longest match of ``retrieval_max`` down to ``retrieval_min`` last tokens is taken. Up to ``candidates`` places
    of this match, evenly spread over all of them, vote on each next token. A place votes for as long as its text agrees
    with the tokens chosen before. So the texts of all candidates make one chain.
    """

    # i32[N] The corpus: ``Datastore.tokens``.
    tokens: jax.Array = dataclasses.field(repr=False)
    # i32[N] The places of the sorted suffixes: ``Datastore.order``.
    order: jax.Array = dataclasses.field(repr=False)
    # The largest token id; static. ``plan`` compares it with the target's vocabulary.
    highest: int
    # The most and the fewest tokens of a match.
    retrieval_max: int = 8
    retrieval_min: int = 2
    # How many places of a match vote.
    candidates: int = 32

    @classmethod
    def over(
        cls, datastore: Datastore, retrieval_max: int = 8, retrieval_min: int = 2, candidates: int = 32
    ) -> "Retrieval":
        """Puts a datastore on the device, and makes the drafter that searches it.

        Args:
          datastore: the corpus.
          retrieval_max: the most tokens of a match.
          retrieval_min: the fewest tokens of a match.
          candidates: how many places of a match vote.

        Raises:
          ValueError: unless all three are integers, 1 <= retrieval_min <= retrieval_max <= Datastore.DEPTH, and
            candidates >= 1.
        """
        check_counts(1, retrieval_max=retrieval_max, retrieval_min=retrieval_min, candidates=candidates)
        if not retrieval_min <= retrieval_max <= Datastore.DEPTH:
            raise ValueError(
                f"retrieval needs retrieval_min <= retrieval_max <= {Datastore.DEPTH}, got {retrieval_min!r} and "
                f"{retrieval_max!r}"
            )
        tokens, order = jnp.asarray(np.asarray(datastore.tokens)), jnp.asarray(np.asarray(datastore.order))
        return cls(tokens, order, int(np.max(datastore.tokens)), retrieval_max, retrieval_min, candidates)

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        vocab = target.vocab_size
        if self.highest >= vocab:
            raise ValueError(
                f"the datastore has token id {self.highest}, outside the target's vocabulary of {vocab}: "
                "it was built with another tokenizer; build it with the target's"
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
            drafted, valid = self._vote(low[best], high[best], sizes[best], num_speculative_tokens)
            return drafted, valid & found[best]

        tokens, valid = jax.vmap(row)(state.tokens, state.lengths)
        return Draft(tokens, valid, None), own, state.cache

    def _range(self, query: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Finds the sorted suffixes that begin with a query, by a search with FANOUT branches at each step.

        Args:
          query: i32[retrieval_max], the tokens that are searched, then any others.
          size: i32[], how many tokens of ``query`` are searched.

        Returns:
          i32[] low and i32[] high: the suffixes at ranks low to high - 1 begin with the query.
        """
        index = span(self.retrieval_max)
        steps = jnp.arange(1, FANOUT, dtype=jnp.int32)
        total = self.order.shape[0]

        def before(count, inclusive):
            """Whether the suffix at rank count - 1 sorts before the query, or, if ``inclusive``, begins with it."""
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
        while level:  # each pass finds one digit of both ranks, in base FANOUT
            low += level * jnp.sum(before(low + level * steps, False), dtype=jnp.int32)
            high += level * jnp.sum(before(high + level * steps, True), dtype=jnp.int32)
            level //= FANOUT
        return low, high

    def _vote(self, low: jax.Array, high: jax.Array, size: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
        """The tokens that most candidates vote for, one after another.

        Args:
          low, high: i32[], the range of suffixes that match.
          size: i32[], how many tokens match.
          length: K.

        Returns:
          i32[K] tokens, and bool[K] which are proposed. The chain ends where no candidate's text goes on.
        """
        spread = jnp.arange(self.candidates, dtype=jnp.int32) * jnp.maximum(high - low, 1) // self.candidates
        alive = jnp.concatenate([jnp.array([True]), spread[1:] != spread[:-1]])  # no place votes twice
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
    data_fields=["tokens", "order"],
    meta_fields=["highest", "retrieval_max", "retrieval_min", "candidates"],
)
