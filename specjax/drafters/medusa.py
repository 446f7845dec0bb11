"""Medusa: heads on the target's last hidden state draft all tokens at once (Cai et al. 2024).

With ``temperature=0`` and no tree they are the blockwise parallel heads of Stern et al. 2018.
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
from specjax.models.model import Model, Output


class MedusaState(NamedTuple):
    hidden: jax.Array  # [B, H] the target's at the last token but one, from which it made the last
    ready: jax.Array  # bool[B] whether it is that


@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no one answer to ==
class Medusa(ChainOrTree):
    """Draws up to as many tokens as there are heads, each without regard to those before it; or a tree of them.

    Args:
      config: the heads' shape.
      params: their weights, the tree of ``modules.structure(models.medusa_heads.MedusaHeads, config)``.
      tokens: i32[D], the target's id of each token that they can draft; None: all, as they are.
      tree: None for a chain; how a tree grows (``FixedTree``, ``DynamicTree``), its topology, or its widths.
      temperature: replaces the request's while drafting.
    """

    config: MedusaHeadsConfig
    params: dict = dataclasses.field(repr=False)
    tokens: jax.Array | None = dataclasses.field(repr=False)
    tree: Tree | Topology | Sequence[int] | None = None
    temperature: float | None = None

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        if self.config.hidden_size != target.hidden_size:
            raise ValueError(
                f"these heads read hidden states of size {self.config.hidden_size}, but the target's are "
                f"{target.hidden_size}: they were trained for another model"
            )
        return super().plan(target, num_speculative_tokens)

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> MedusaState:
        del capacity, num_speculative_tokens
        return MedusaState(jnp.zeros((batch, target.hidden_size), target.dtype), jnp.zeros(batch, bool))

    def follow(
        self, target: Model, own: MedusaState, state: DecodeState, starts: jax.Array, out: Output
    ) -> MedusaState:
        at = state.request.prompt_lengths - 2 - starts
        here = (at >= 0) & (at < out.hidden.shape[1])
        hidden = row_at(out.hidden, jnp.clip(at, 0, out.hidden.shape[1] - 1))
        return MedusaState(jnp.where(here[:, None], hidden, own.hidden), own.ready | here)

    def resume(self, target: Model, own: MedusaState, state: DecodeState) -> MedusaState:
        """Asks the target again for rows whose state is not known."""
        lags = state.active & (state.lengths >= 2) & ~own.ready

        def ask():
            at = jnp.maximum(state.lengths - 2, 0)
            token = state.tokens[jnp.arange(len(at), dtype=jnp.int32), at]
            out = target(token[:, None], kv.with_lengths(state.cache, at), with_logits=False)
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
