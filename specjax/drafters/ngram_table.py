"""Unigram and bigram drafts: next-token tables counted in a corpus (Leviathan et al. 2023, sections 3.6 and 4.2)."""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.numeric import check_count
from specjax.decode.types import DecodeState, Draft, Plan
from specjax.drafting.base import OftenSilent
from specjax.drafting.draw_chain import check_temperature, draw_chain
from specjax.models.cache import KVCache
from specjax.models.model import Model


@dataclasses.dataclass(frozen=True, eq=False)  # == of two arrays is an array, not one answer
class NGramTable(OftenSilent):
    """Draws K tokens from counted frequencies of next tokens. A token without a counted successor ends the chain.

    :meth:`count` makes a table. R is the number of contexts: 1 for unigrams, the vocabulary size for bigrams.
    """

    # i32[R, M] The successors in each context, the most frequent first, padded with the vocabulary size.
    tokens: jax.Array = dataclasses.field(repr=False)
    # f32[R, M] The log-probability of each successor; -inf where ``tokens`` is padding.
    logprobs: jax.Array = dataclasses.field(repr=False)
    # Replaces the request's temperature while drafting. None: the request's.
    temperature: float | None = None

    def __post_init__(self):
        check_temperature(self.temperature)

    @classmethod
    def count(
        cls,
        sequences: Iterable[Sequence[int]],
        vocab_size: int,
        order: int = 2,
        keep: int = 64,
        temperature: float | None = None,
    ) -> "NGramTable":
        """Counts the tokens of a corpus. The corpus may be the target's own output.

        Args:
          sequences: texts as lists of token ids.
          vocab_size: the target's vocabulary size.
          order: 1 for unigrams, 2 for bigrams.
          keep: how many successors are kept in each context. The most frequent ones are kept.
          temperature: replaces the request's temperature while drafting. None: the request's.

        Raises:
          ValueError: ``order`` is neither 1 nor 2, ``keep`` is no integer of at least 1, an id is outside the
            vocabulary, or the corpus has nothing to count.
        """
        if order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, got {order!r}")
        check_count("keep", keep)
        texts = [np.asarray(s, np.int64) for s in sequences]
        # Each pair is a context and the token after it. The one context of unigrams has the number 0.
        pairs = [np.stack([t[:-1] if order == 2 else np.zeros_like(t), t[1:] if order == 2 else t]) for t in texts]
        context, following = np.concatenate(pairs, axis=1) if pairs else np.zeros((2, 0), np.int64)
        if not following.size:
            raise ValueError("the corpus is empty: give at least one sequence of two tokens")
        low, high = min(t.min() for t in texts if t.size), max(t.max() for t in texts if t.size)
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"the corpus has token id {low if low < 0 else high}, outside the vocabulary {vocab_size}: ids must be "
                f"from 0 to {vocab_size - 1}; encode the corpus with the target's tokenizer"
            )
        codes, counts = np.unique(context * vocab_size + following, return_counts=True)
        context, following = np.divmod(codes, vocab_size)
        order_in_row = np.lexsort((following, -counts, context))
        context, following, counts = context[order_in_row], following[order_in_row], counts[order_in_row]
        rank = np.arange(context.size) - np.searchsorted(context, context)  # 0 for a context's most frequent successor
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
            raise ValueError(
                f"this bigram table was counted for a vocabulary of {rows}, but the target has {vocab}: count one with "
                "vocab_size=target.vocab_size"
            )
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
