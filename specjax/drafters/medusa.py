"""Medusa: heads on the target's last hidden state draft all tokens at once (Cai et al. 2024).

With ``temperature=0`` and no tree, Medusa is blockwise parallel decoding (Stern et al. 2018).
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode.arrays import row_at
from specjax.decode.types import DecodeState, Draft, Outcome, Plan
from specjax.drafting.draw_chain import spreading
from specjax.drafting.grow_tree import ChainOrTree, Tree, drawn_at_once
from specjax.drafting.topology import Topology
from specjax.models import cache as kv
from specjax.models import modules
from specjax.models.cache import KVCache
from specjax.models.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig
from specjax.models.model import Model, Output, check_no_encoder


class MedusaState(NamedTuple):
    # [B, H] The hidden state from which the target predicted the last committed token: the one at the token before.
    hidden: jax.Array
    # bool[B] Whether ``hidden`` is up to date. A row that is not ready proposes nothing.
    ready: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)  # == of two arrays is an array, not one answer
class Medusa(ChainOrTree):
    """Draws the tokens of each depth from one head, whatever the tokens before them, as a chain or as a tree.

    Head i predicts the token i + 1 places after the last committed token's position, so a draft is at most as deep as
    there are heads.

    Args:
      config: the heads' shape.
      params: the heads' weights, the tree of ``modules.structure(MedusaHeads, config)``.
      tokens: i32[D], the target's id of each token that the heads can draft. None: the heads draft all of the target's
        tokens, under the target's ids.
      tree: None for a chain. For a tree: how the tree grows (``FixedTree``, ``DynamicTree``), its topology, or its
        widths.
      temperature: replaces the request's temperature while drafting. None: the request's.

    Raises:
      ValueError: ``tree`` is no tree, or ``temperature`` is no number from 0 on.
    """

    config: MedusaHeadsConfig
    params: dict = dataclasses.field(repr=False)
    tokens: jax.Array | None = dataclasses.field(repr=False)
    tree: Tree | Topology | Sequence[int] | None = None
    temperature: float | None = None

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        check_no_encoder(target, "Medusa")
        if self.config.hidden_size != target.hidden_size:
            raise ValueError(
                f"these heads read hidden states of size {self.config.hidden_size}, but the target's are "
                f"{target.hidden_size}: they were trained for another model; load heads for this target"
            )
        return super().plan(target, num_speculative_tokens)

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> MedusaState:
        del capacity, num_speculative_tokens
        return MedusaState(jnp.zeros((batch, target.hidden_size), target.dtype), jnp.zeros(batch, bool))

    def follow(
        self, target: Model, own: MedusaState, state: DecodeState, starts: jax.Array, out: Output
    ) -> MedusaState:
        index = state.request.prompt_lengths - 2 - starts  # i32[B], where the block has the last prompt token but one
        here = (index >= 0) & (index < out.hidden.shape[1])
        hidden = row_at(out.hidden, jnp.clip(index, 0, out.hidden.shape[1] - 1))
        return MedusaState(jnp.where(here[:, None], hidden, own.hidden), own.ready | here)

    def resume(self, target: Model, own: MedusaState, state: DecodeState) -> MedusaState:
        """Runs the target again on the last token but one, for active rows that are not ready."""
        lags = state.active & (state.lengths >= 2) & ~own.ready

        def ask():
            position = jnp.maximum(state.lengths - 2, 0)
            token = state.tokens[jnp.arange(len(position), dtype=jnp.int32), position]
            out = target(token[:, None], kv.with_lengths(state.cache, position), with_logits=False)
            return MedusaState(jnp.where(lags[:, None], out.hidden[:, 0], own.hidden), own.ready | lags)

        return lax.cond(jnp.any(lags), ask, lambda: own)

    def propose(
        self, target: Model, own: MedusaState, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, MedusaState, KVCache]:
        module, vocab = modules.merge(MedusaHeads, self.config, self.params), target.vocab_size
        logits = module.head(module(own.hidden[:, None])[:, 0])  # [B, heads, D]
        logits = spreading(self.tokens, vocab)(logits)
        draft = drawn_at_once(logits, self.tree, state, keys, num_speculative_tokens, self.temperature)
        return draft._replace(valid=draft.valid & own.ready[:, None]), own, state.cache

    def commit(self, target: Model, own: MedusaState, state: DecodeState, outcome: Outcome | None) -> MedusaState:
        del target
        if outcome is None:
            return own._replace(ready=jnp.zeros_like(own.ready))
        return MedusaState(row_at(outcome.hidden, outcome.accepted), state.active)


jax.tree_util.register_dataclass(
    Medusa, data_fields=["params", "tokens"], meta_fields=["config", "tree", "temperature"]
)
