"""DFlash: a trained head drafts all tokens in one call, from the target's hidden states (Chen et al. 2026).

The head keeps an entry for each token that the target has read. An example with n = 5 committed tokens A B C D E (token
0 is A), of which the target has read A to D, and blocks of four tokens:

    slot of the cache       0    1    2    3  |  4    5    6    7
    entry made from         A    B    C    D  |  E    ?    ?    ?     entries 0 to 3: the target's states at a token
    prediction                                |       f    g    h     from slot 4 on: the block, E and masked tokens

Every token of the block sees all eight slots. So the laws of f, g and h depend on the committed text alone, and none of
them on a drafted token: the law of the whole draft is their product, and each token is judged with its own q. The block
has always the size that the head was trained for. So the laws don't depend on K either.

After the round the entries of the block are stale, and ``commit`` writes entries with the target's states there.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode.arrays import row_at, span
from specjax.decode.prefill import check_chunk
from specjax.decode.types import DecodeState, Draft, Outcome, Plan
from specjax.drafting.draw_chain import spreading
from specjax.drafting.grow_tree import ChainOrTree, Tree, drawn_at_once
from specjax.drafting.topology import Topology
from specjax.models import cache as kv
from specjax.models import modules, tuning
from specjax.models.axes import of_rows
from specjax.models.cache import KVCache
from specjax.models.heads.dflash_head import DFlashHead, DFlashHeadConfig
from specjax.models.heads.taps import check_target
from specjax.models.model import Model, Output, check_no_encoder


@dataclasses.dataclass(frozen=True, eq=False)  # == of two arrays is an array, not one answer
class DFlash(ChainOrTree):
    """Draws the token at each masked place of a block from the head's law there, as a chain or as a tree.

    The own state is the head's cache. A row of n committed tokens is ready to draft when it has n - 1 entries. The head
    reads the prompt along with the target. Under a cascade it can't follow the target, and ``resume`` catches up.

    Args:
      config: the head's shape. A draft is at most ``block_size`` - 1 tokens deep.
      params: the head's weights, the tree of ``modules.structure(DFlashHead, config)``.
      tokens: i32[D], the target's id of each token that the head can draft. None: the head drafts all of the target's
        tokens, under the target's ids.
      tree: None for a chain. For a tree: how the tree grows (``FixedTree``, ``DynamicTree``), its topology, or its
        widths. All tokens of one depth are drawn from one law.
      temperature: replaces the request's temperature while drafting. None: the request's.
      prefill_chunk: how many tokens are fed at a time when the head is behind. None: 512, on a CPU 64.

    Raises:
      ValueError: ``tree`` is no tree, ``temperature`` is no number from 0 on, or ``prefill_chunk`` is no integer of at
        least 1.
    """

    config: DFlashHeadConfig
    params: dict = dataclasses.field(repr=False)
    tokens: jax.Array | None = dataclasses.field(repr=False)
    tree: Tree | Topology | Sequence[int] | None = None
    temperature: float | None = None
    prefill_chunk: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_chunk(self.prefill_chunk)

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        check_no_encoder(target, "DFlash")
        c = self.config
        check_target("DFlash", c.layer.hidden_size, c.taps, target)
        if c.mask_token_id >= target.vocab_size:
            raise ValueError(
                f"this DFlash head masks with token {c.mask_token_id}, but the target has {target.vocab_size} tokens: "
                "the head was trained for another model; load a head for this target"
            )
        return super().plan(target, num_speculative_tokens)._replace(taps=c.taps)

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> KVCache:
        del num_speculative_tokens
        room = kv.room(capacity + self.config.block_size)
        # Every device of the target's mesh holds all heads of its rows, as of an EAGLE head.
        sharding = None if target.mesh is None else of_rows(target.mesh)
        return kv.alloc(self.config.layer, batch, room, target.dtype, sharding)

    def follow(self, target: Model, own: KVCache, state: DecodeState, starts: jax.Array, out: Output) -> KVCache:
        everyone = jnp.ones_like(state.active)
        return self._extended(own, starts, out.taps, state.request.prompt_lengths - 1, everyone)

    def resume(self, target: Model, own: KVCache, state: DecodeState) -> KVCache:
        size = min(tuning.prefill_chunk(self.prefill_chunk), state.cache.capacity)

        def lags(own: KVCache) -> jax.Array:
            return state.active & (own.lengths < state.lengths - 1)

        def feed(own: KVCache) -> KVCache:
            # Near the end of a contiguous cache a chunk starts early and makes some entries anew. Of a paged cache no
            # entry may be made anew, since its page may belong to other rows too.
            starts = jnp.minimum(own.lengths, state.cache.last_start(size))
            tokens = jnp.take_along_axis(state.tokens, starts[:, None] + span(size), axis=1, mode="clip")
            out = target(tokens, kv.with_lengths(state.cache, starts), with_logits=False, taps=self.config.taps)
            return self._extended(own, starts, out.taps, state.lengths - 1, lags(own))

        return lax.while_loop(lambda own: jnp.any(lags(own)), feed, own)

    def propose(
        self, target: Model, own: KVCache, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, KVCache, KVCache]:
        head, masked = self._head(), self.config.block_size - 1
        last = row_at(state.tokens, jnp.maximum(state.lengths - 1, 0))
        block = jnp.pad(last[:, None], ((0, 0), (0, masked)), constant_values=self.config.mask_token_id)  # [B, S]
        cache = kv.with_lengths(own, jnp.maximum(state.lengths - 1, 0))
        hidden, cache = head(target.embed(block), cache)
        logits = head.head(hidden[:, 1:])  # [B, S - 1, D], whatever K is, so that no bit of q depends on K
        logits = spreading(self.tokens, target.vocab_size)(logits)
        draft = drawn_at_once(logits, self.tree, state, keys, num_speculative_tokens, self.temperature)
        ready = own.lengths == state.lengths - 1
        draft = draft._replace(valid=draft.valid & ready[:, None])
        return draft, kv.with_lengths(cache, own.lengths), state.cache

    def commit(self, target: Model, own: KVCache, state: DecodeState, outcome: Outcome | None) -> KVCache:
        del target
        known = jnp.maximum(state.lengths - 1, 0)
        if outcome is None:  # the target's states are not known; an entry depends on its own token and those before
            return kv.with_lengths(own, jnp.minimum(own.lengths, known))
        # The row's length before the round. An ended row writes past its end: its pages may be other rows' too.
        before = jnp.where(state.active, state.lengths - outcome.accepted - 1, state.lengths)
        starts = jnp.maximum(before - 1, 0)
        return self._extended(own, starts, outcome.taps, known, state.active & (own.lengths == starts))

    def _extended(
        self, own: KVCache, starts: jax.Array, taps: Mapping[int, jax.Array], wanted: jax.Array, rows: jax.Array
    ) -> KVCache:
        """The own state after T more entries of the committed text.

        Args:
          own: the own state.
          starts: i32[B], the number of the first new entry, and the position of its token.
          taps: the target's states at positions from ``starts`` on, each [B, T, H].
          wanted: i32[B], how many entries the row's text has. Entries past that are padding.
          rows: bool[B], the rows that take the new entries. The others keep their lengths.
        """
        cache = self._head().remember({after: taps[after] for after in self.config.taps}, kv.with_lengths(own, starts))
        reached = jnp.minimum(starts + taps[self.config.taps[0]].shape[1], wanted)
        return kv.with_lengths(cache, jnp.where(rows, jnp.maximum(reached, own.lengths), own.lengths))

    def _head(self) -> DFlashHead:
        return modules.merge(DFlashHead, self.config, self.params)


jax.tree_util.register_dataclass(
    DFlash, data_fields=["params", "tokens"], meta_fields=["config", "tree", "temperature", "prefill_chunk"]
)
