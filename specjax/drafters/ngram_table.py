"""Unigram and bigram drafts: next-token tables counted from a text (Leviathan et al. 2023, sections 3.6 and 4.2)."""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.types import DecodeState, Draft, Plan
from specjax.drafting.base import OftenSilent
from specjax.drafting.draw_chain import draw_chain
from specjax.models.cache import KVCache
from specjax.models.model import Model


@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no one answer to ==
class NGramTable(OftenSilent):
    """Draws K tokens from counted next-token frequencies; a token that was never seen to go on ends the chain.

    Made by :meth:`count`.
    """

    # i32[R, M] successors, the most frequent first, padded with the vocabulary size
    tokens: jax.Array = dataclasses.field(repr=False)
    # f32[R, M]; R = 1 for unigrams, the vocabulary size for bigrams
    logprobs: jax.Array = dataclasses.field(repr=False)
    temperature: float | None = None

    @classmethod
    def count(
        cls,
        sequences: Iterable[Sequence[int]],
        vocab_size: int,
        order: int = 2,
        keep: int = 64,
        temperature: float | None = None,
    ) -> "NGramTable":
        """Counts a corpus, which may be the target's own output.

        Args:
          sequences: lists of token ids.
          vocab_size: of the target.
          order: 1 for unigrams, 2 for bigrams.
          keep: successors kept for each context, the most frequent.
          temperature: replaces the request's while drafting.

        Raises:
          ValueError: for another order, an id outside the vocabulary, or a corpus with nothing to count.
        """
        if order not in (1, 2) or keep < 1:
            raise ValueError(f"order must be 1 or 2 and keep at least 1, got {order!r} and {keep!r}")
        texts = [np.asarray(s, np.int64) for s in sequences]
        pairs = [np.stack([t[:-1] if order == 2 else np.zeros_like(t), t[1:] if order == 2 else t]) for t in texts]
        context, following = np.concatenate(pairs, axis=1) if pairs else np.zeros((2, 0), np.int64)
        if not following.size:
            raise ValueError("the corpus is empty: give at least one sequence of two tokens")
        low, high = min(t.min() for t in texts if t.size), max(t.max() for t in texts if t.size)
        if low < 0 or high >= vocab_size:
            raise ValueError(f"the corpus has token id {low if low < 0 else high}, outside the vocabulary {vocab_size}")
        codes, counts = np.unique(context * vocab_size + following, return_counts=True)
        context, following = np.divmod(codes, vocab_size)
        order_in_row = np.lexsort((following, -counts, context))
        context, following, counts = context[order_in_row], following[order_in_row], counts[order_in_row]
        rank = np.arange(context.size) - np.searchsorted(context, context)
        kept = rank < keep
        rows = 1 if order == 1 else vocab_size
        width = int(rank[kept].max()) + 1
        tokens = np.full((rows, width), vocab_size, np.int32)
        logprobs = np.full((rows, width), -np.inf, np.float32)
        tokens[context[kept], rank[kept]] = following[kept]
        totals = np.bincount(context[kept], counts[kept], rows)
        logprobs[context[kept], rank[kept]] = np.log(counts[kept] / totals[context[kept]])
        return cls(jnp.asarray(tokens), jnp.asarray(logprobs), temperature)

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        rows, vocab = self.tokens.shape[0], target.vocab_size
        if rows not in (1, vocab):
            raise ValueError(f"this bigram table was counted for a vocabulary of {rows}, but the target has {vocab}")
        return super().plan(target, num_speculative_tokens)

    def propose(
        self, target: Model, own: tuple, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, tuple, KVCache]:
        vocab = target.vocab_size

        def next_logits(carry, previous, last, position):
            row = jnp.minimum(last, self.tokens.shape[0] - 1)
            nothing = jnp.full((vocab,), -jnp.inf, jnp.float32)
            spread = jax.vmap(lambda tokens, logprobs: nothing.at[tokens].set(logprobs, mode="drop"))
            return spread(self.tokens[row], self.logprobs[row]), carry

        draft, _ = draw_chain(next_logits, (), state, keys, num_speculative_tokens, vocab, self.temperature)
        return draft, own, state.cache


jax.tree_util.register_dataclass(NGramTable, data_fields=["tokens", "logprobs"], meta_fields=["temperature"])
