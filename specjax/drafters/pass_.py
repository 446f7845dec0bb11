"""PaSS: one call of the target with trained look-ahead tokens drafts several tokens (Monea et al. 2023)."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specjax.decode.arrays import row_at
from specjax.decode.types import DecodeState, Draft, Plan
from specjax.drafting.base import Stateless
from specjax.drafting.grow_tree import ChainOrTree, Tree, drawn_at_once
from specjax.drafting.topology import Topology
from specjax.models import cache as kv
from specjax.models.cache import KVCache
from specjax.models.heads.pass_tokens import PassConfig
from specjax.models.model import Model, check_no_encoder


@dataclasses.dataclass(frozen=True, eq=False)  # == of two arrays is an array, not one answer
class PaSS(ChainOrTree, Stateless):
    """Draws up to L + 1 tokens from one call of the target on the row's last token and L look-ahead tokens.

    The first drafted token is drawn from the target's own distribution, so this token is always accepted. A round makes
    two calls of the target and commits at least two tokens. The drafting call writes entries to the target's cache, and
    verification overwrites them.

    Args:
      config: how many look-ahead tokens there are, and the size of their embeddings.
      params: the embeddings of the look-ahead tokens, the tree of ``modules.structure(PassTokens, config)``.
      tree: None for a chain. For a tree: how the tree grows (``FixedTree``, ``DynamicTree``), its topology, or its
        widths.
      temperature: replaces the request's temperature while drafting. None: the request's.

    Raises:
      ValueError: ``tree`` is no tree, or ``temperature`` is no number from 0 on.
    """

    config: PassConfig
    params: dict = dataclasses.field(repr=False)
    tree: Tree | Topology | Sequence[int] | None = None
    temperature: float | None = None

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        check_no_encoder(target, "PaSS")
        if self.config.hidden_size != target.hidden_size:
            raise ValueError(
                f"these look-ahead tokens are of size {self.config.hidden_size}, but the target's embeddings are "
                f"{target.hidden_size}: they were trained for another model; load look-ahead tokens for this target"
            )
        return super().plan(target, num_speculative_tokens)._replace(shaped_by_size=True)  # one call of K tokens a row

    def propose(
        self, target: Model, own: tuple, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, tuple, KVCache]:
        last = target.embed(row_at(state.tokens, jnp.maximum(state.lengths - 1, 0)))[:, None]  # [B, 1, H]
        ahead = self.params["table"][: num_speculative_tokens - 1].astype(last.dtype)
        block = jnp.concatenate([last, jnp.broadcast_to(ahead, (len(last), *ahead.shape))], axis=1)
        out = target(None, kv.with_lengths(state.cache, state.lengths - 1), embedded=block)
        draft = drawn_at_once(out.logits, self.tree, state, keys, num_speculative_tokens, self.temperature)
        return draft, own, out.cache


jax.tree_util.register_dataclass(PaSS, data_fields=["params"], meta_fields=["config", "tree", "temperature"])
