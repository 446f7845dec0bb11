"""A draft model that proposes a token tree."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specjax.decode.arrays import row_at, span
from specjax.decode.prefill import catch_up, check_chunk
from specjax.decode.types import DecodeState, Draft, Plan
from specjax.drafters.draft_model import check_draft_model
from specjax.drafting.grow_tree import ChainOrTree, Level, Tree, tree_of
from specjax.drafting.own_model import DraftState, OwnModel
from specjax.drafting.topology import Topology
from specjax.models import cache as kv
from specjax.models.cache import KVCache
from specjax.models.model import Model


@dataclasses.dataclass(frozen=True)
class TreeModel(OwnModel, ChainOrTree):
    """Grows a tree with the draft model, in one call of the model for each level.

    Sources: Miao et al. 2024, SpecInfer; Chen et al. 2024, Sequoia (siblings without replacement). If every node has
    one child, the draft is the draft of ``DraftModel``, token for token.

    Args:
      lm: the draft model.
      tree: how the tree grows (``FixedTree``, ``DynamicTree``), its topology, or its widths. Widths (3, 2, 1) mean
        three first tokens, two tokens after each of these, and one token after each of those six. The tree has
        num_speculative_tokens levels.
      temperature: replaces the request's temperature while drafting. None: the request's. At 0 siblings are the best
        tokens in order, each a point mass.
      prefill_chunk: how many tokens are fed at a time when the cache is behind, at first use or after a pause. None:
        512, on a CPU 64.
      any_tokenizer: drafts although the tokenizer of ``lm`` differs from the target's, as in ``DraftModel``.

    Raises:
      ValueError: ``tree`` is no tree, ``temperature`` is no finite number of at least 0, or ``prefill_chunk`` is no
        integer of at least 1.
    """

    lm: Model
    tree: Tree | Topology | Sequence[int]
    temperature: float | None = None
    prefill_chunk: int | None = None
    any_tokenizer: bool = False

    def __post_init__(self):
        tree_of(self.tree)  # refuses None, which means a chain for other drafters
        super().__post_init__()
        check_chunk(self.prefill_chunk)

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        check_draft_model(target, self.lm, self.any_tokenizer)
        return super().plan(target, num_speculative_tokens)

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> DraftState:
        del target
        return DraftState(self.lm.alloc_cache(batch, kv.room(capacity + self.room(num_speculative_tokens))))

    def propose(
        self, target: Model, own: DraftState, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, DraftState, KVCache]:
        # The last K + 1 tokens are fed again in order. A round commits no more than these, so it does not matter which
        # path the committed tokens took through the last tree. No tree held the prompt's tokens, so of these only the
        # last is fed again: in an engine the pages of the others may belong to other requests too.
        recent = num_speculative_tokens + 1
        fed = jnp.maximum(state.lengths - recent, state.request.prompt_lengths - 1)
        cache = catch_up(self.lm, own.cache, state, fed, self.prefill_chunk)
        held = jnp.where(state.active, state.lengths, cache.lengths)  # an idle row's cache may lag behind
        block = jnp.take_along_axis(state.tokens, fed[:, None] + span(recent), axis=1)
        out = self.lm(block, kv.with_lengths(cache, fed))
        last = row_at(out.logits, state.lengths - 1 - fed)

        def step(cache, tokens: jax.Array, level: Level):
            cache = kv.with_lengths(cache, state.lengths + level.fed)
            out = self.lm(tokens, cache, *level.attention(state.lengths, cache.capacity))
            return out.logits, out.cache

        vocab = target.vocab_size
        draft, cache = self.tree.grow(  # type: ignore[union-attr]
            step, last, out.cache, state, keys, num_speculative_tokens, vocab, self.temperature
        )
        depth = draft.shape.depths(draft.tokens.shape[1])[:, 1:]
        fits = state.lengths[:, None] + depth - 1 <= self.lm.max_positions
        own = DraftState(kv.with_lengths(cache, held))
        return draft._replace(valid=draft.valid & fits), own, state.cache


jax.tree_util.register_dataclass(
    TreeModel, data_fields=["lm"], meta_fields=["tree", "temperature", "prefill_chunk", "any_tokenizer"]
)
