"""EAGLE: a trained head drafts from the target's hidden states, a chain or a tree (Li et al. 2024, 2025).

The head reads a sequence of entries. Entry j joins two things: the target's states at token j (the feature), and the
embedding of token j + 1. The entry's output predicts token j + 2. An example with n = 5 committed tokens A B C D E
(token 0 is A) and two drafted tokens f g:

    token  feature                       entry  prediction
    B      the target's states at A      0      C
    C      the target's states at B      1      D
    D      the target's states at C      2      E
    E      the target's states at D      3      f           the last entry in the cache; ``EagleState.output``
    f      the head's output at entry 3  4      g           made by ``propose``; the target has not read E yet
    g      the head's output at entry 4  5      ...         only if a third token is drafted

The target has read A to D: the last committed token is fed by the next verification. So n committed tokens have n - 1
entries. After the round ``commit`` replaces the entries of the drafted tokens by entries with the target's states, and
keeps the last one's output. So the first token is drafted without a call of the head.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode.arrays import row_at, span
from specjax.decode.prefill import check_chunk
from specjax.decode.types import DecodeState, Draft, Outcome, Plan
from specjax.drafting.draw_chain import draw_chain
from specjax.drafting.grow_tree import ChainOrTree, Level, Tree
from specjax.drafting.topology import Topology
from specjax.models import cache as kv
from specjax.models import modules, tuning
from specjax.models.cache import KVCache
from specjax.models.heads import eagle3_head
from specjax.models.heads.eagle1_head import Eagle1Head, Eagle1HeadConfig
from specjax.models.heads.eagle3_head import Eagle3Head, Eagle3HeadConfig
from specjax.models.heads.taps import check_target
from specjax.models.model import Model, Output, check_no_encoder

Head = Eagle3Head | Eagle1Head


class EagleState(NamedTuple):
    """The entries of each row's committed text; the table at the top of this file shows them."""

    # The head's cache. Its lengths say how many entries it holds: n - 1 for a ready row of n committed tokens.
    cache: KVCache
    # [B, H] The head's output at entry n - 2, from which the first token is drafted. Unset if not ready.
    output: jax.Array
    # bool[B] Whether ``cache`` and ``output`` are up to date. A row that is not ready proposes nothing.
    ready: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)  # == of two arrays is an array, not one answer
class Eagle(ChainOrTree):
    """Draws K tokens one after the other, each from the head's output for the token before, or grows a tree of tokens.

    The head reads the prompt along with the target. Under a cascade the head can't follow the target. Then ``resume``
    catches up: the target is run again for its states, ``prefill_chunk`` tokens at a time.

    Args:
      config: the head's shape: an ``Eagle3HeadConfig``, or an ``Eagle1HeadConfig`` (EAGLE and EAGLE-2).
      params: the head's weights, the tree of ``modules.structure(config.module, config)``.
      tokens: i32[D], the target's id of each token that the head can draft. None: the head drafts all of the target's
        tokens, under the target's ids.
      tree: None for a chain. For a tree: how the tree grows (``FixedTree``, ``DynamicTree``), its topology, or its
        widths.
      temperature: replaces the request's temperature while drafting. None: the request's.
      prefill_chunk: how many tokens are fed at a time when the head is behind. None: 512, on a CPU 64.
      embed: [V, H], the head's own embedding. None: the head uses the target's embedding.

    Raises:
      ValueError: ``tree`` is no tree, ``temperature`` is no number from 0 on, or ``prefill_chunk`` is no integer of at
        least 1.
    """

    config: Eagle3HeadConfig | Eagle1HeadConfig
    params: dict = dataclasses.field(repr=False)
    tokens: jax.Array | None = dataclasses.field(repr=False)
    tree: Tree | Topology | Sequence[int] | None = None
    temperature: float | None = None
    prefill_chunk: int | None = None
    embed: jax.Array | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        super().__post_init__()
        check_chunk(self.prefill_chunk)

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        check_no_encoder(target, "Eagle")
        taps = self.config.taps
        check_target("EAGLE", self.config.layer.hidden_size, taps, target)
        return super().plan(target, num_speculative_tokens)._replace(taps=taps)

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> EagleState:
        room = kv.room(capacity + self.room(num_speculative_tokens))
        cache = eagle3_head.alloc_cache(self.config, batch, room, target.dtype, target.mesh)
        output = jnp.zeros((batch, target.hidden_size), target.dtype)
        return EagleState(cache, output, jnp.zeros(batch, bool))

    def follow(self, target: Model, own: EagleState, state: DecodeState, starts: jax.Array, out: Output) -> EagleState:
        head = self._head()
        size = out.hidden.shape[1]
        tokens = jnp.take_along_axis(state.tokens, starts[:, None] + 1 + span(size), axis=1, mode="clip")
        features, everyone = self._features(head, out), jnp.ones_like(own.ready)
        return self._extend(target, head, own, starts, features, tokens, state.request.prompt_lengths - 1, everyone)

    def resume(self, target: Model, own: EagleState, state: DecodeState) -> EagleState:
        """Makes every active row of at least two tokens ready.

        A row of one token has no entry yet, so the row proposes nothing. The next ``commit`` makes the row ready.
        """
        head = self._head()
        size = min(tuning.prefill_chunk(self.prefill_chunk), state.cache.capacity)

        def behind(own: EagleState):
            return jnp.any(_lags(own, state))

        def feed(own: EagleState) -> EagleState:
            # Near the end of a contiguous cache a chunk starts early and makes some entries anew. Of a paged cache no
            # entry may be made anew, since its page may belong to other rows too.
            starts = jnp.minimum(own.cache.lengths, state.cache.last_start(size))
            tokens = jnp.take_along_axis(state.tokens, starts[:, None] + span(size + 1), axis=1, mode="clip")
            out = target(tokens[:, :-1], kv.with_lengths(state.cache, starts), with_logits=False, taps=self.config.taps)
            features, lags = self._features(head, out), _lags(own, state)
            return self._extend(target, head, own, starts, features, tokens[:, 1:], state.lengths - 1, lags)

        return lax.while_loop(behind, feed, own)

    def propose(
        self, target: Model, own: EagleState, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, EagleState, KVCache]:
        head = self._head()
        draft, cache = (self._chain if self.tree is None else self._tree)(
            target, head, own, state, keys, num_speculative_tokens
        )
        own = own._replace(cache=kv.with_lengths(cache, own.cache.lengths))
        return draft._replace(valid=draft.valid & own.ready[:, None]), own, state.cache

    def commit(self, target: Model, own: EagleState, state: DecodeState, outcome: Outcome | None) -> EagleState:
        if outcome is None:  # the target's states are not known, and the token of the last entry may have changed
            kept = jnp.clip(own.cache.lengths, 0, jnp.maximum(state.lengths - 2, 0))
            return own._replace(cache=kv.with_lengths(own.cache, kept), ready=jnp.zeros_like(own.ready))
        head = self._head()
        features = self._features(head, outcome)  # [B, K+1, H] of the tokens from the last one before the round on
        # The row's length before the round. An ended row writes past its end: its pages may be other rows' too.
        before = jnp.where(state.active, state.lengths - outcome.accepted - 1, state.lengths)
        starts = jnp.maximum(before - 1, 0)
        tokens = jnp.take_along_axis(state.tokens, starts[:, None] + 1 + span(features.shape[1]), axis=1, mode="clip")
        rows = state.active & (own.ready | (before == 1))  # a row of one token lacked no entry
        own = self._extend(target, head, own, starts, features, tokens, state.lengths - 1, rows)
        return own._replace(ready=own.ready & state.active)

    def _chain(self, target: Model, head: Head, own: EagleState, state: DecodeState, keys: jax.Array, size: int):
        """A chain of ``size`` tokens, and the head's cache with the entries of the draft behind the committed ones."""

        def logits(hidden):
            return head.head(hidden[:, None])[:, 0]

        def first(carry, previous, last, position):
            return logits(carry[0]), carry

        def next_logits(carry, previous, last, position):
            feature, cache = carry
            cache = kv.with_lengths(cache, jnp.maximum(position - 1, 0))
            hidden, cache = head(self._embedded(target, last)[:, None], feature[:, None], cache)
            return logits(hidden[:, 0]), (hidden[:, 0], cache)

        carry, vocab = (own.output, own.cache), target.vocab_size
        draft, (_, cache) = draw_chain(
            next_logits, carry, state, keys, size, vocab, self.temperature,
            first=first, ids=self.tokens, unroll=tuning.levels_unrolled(),
        )  # fmt: skip
        return draft, cache

    def _tree(self, target: Model, head: Head, own: EagleState, state: DecodeState, keys: jax.Array, depth: int):
        """A tree ``depth`` deep, and the head's cache with the entries of the draft behind the committed ones."""
        root = jnp.maximum(state.lengths - 1, 0)  # the tree's entries follow that of the last committed token
        rows = jnp.arange(root.shape[0], dtype=jnp.int32)

        def step(carry, tokens: jax.Array, level: Level):
            above, cache = carry  # above is [B, W', H], the head's outputs at the level before
            cache = kv.with_lengths(cache, root + level.fed)
            features = above[rows[:, None], level.parents]
            hidden, cache = head(
                self._embedded(target, tokens), features, cache, *level.attention(root, cache.capacity)
            )
            return head.head(hidden), (hidden, cache)

        output, grown, vocab = own.output[:, None], cast(Tree, self.tree), target.vocab_size
        logits = head.head(output)[:, 0]
        draft, (_, cache) = grown.grow(
            step, logits, (output, own.cache), state, keys, depth, vocab, self.temperature, self.tokens
        )
        return draft, cache

    def _embedded(self, target: Model, tokens: jax.Array) -> jax.Array:
        """The embeddings that this head reads of tokens i32[...]. -> [..., H]."""
        return target.embed(tokens) if self.embed is None else self.embed[tokens]

    def _extend(
        self,
        target: Model,
        head: Head,
        own: EagleState,
        starts: jax.Array,
        features: jax.Array,
        tokens: jax.Array,
        wanted: jax.Array,
        rows: jax.Array,
    ) -> EagleState:
        """The own state after T more entries of the committed text.

        Args:
          target: the target, whose embedding the head may use.
          head: the head.
          own: the own state.
          starts: i32[B], the number of the first new entry. That is also the position of the entry's feature.
          features: [B, T, H], the target's states at positions from ``starts`` on, fused.
          tokens: i32[B, T], the token of each entry: those at positions from ``starts + 1`` on.
          wanted: i32[B], how many entries the row's text has. Entries past that are padding.
          rows: bool[B], the rows that take the new entries. The others keep their state.

        Returns:
          The new own state. A row becomes ready once its last entry is among the new ones.
        """
        size = tokens.shape[1]
        hidden, cache = head(self._embedded(target, tokens), features, kv.with_lengths(own.cache, starts))
        # A row that has all its entries keeps its state: later blocks of a prompt are padding for this row.
        taken = rows & (starts < wanted)
        reached = taken & (wanted <= starts + size)
        output = row_at(hidden, jnp.clip(wanted - 1 - starts, 0, size - 1))
        lengths = jnp.where(taken, jnp.minimum(starts + size, wanted), own.cache.lengths)
        return EagleState(
            kv.with_lengths(cache, lengths), jnp.where(reached[:, None], output, own.output), own.ready | reached
        )

    def _head(self) -> Head:
        return modules.merge(self.config.module, self.config, self.params)

    def _features(self, head: Head, out: Output | Outcome) -> jax.Array:
        """The target's states at T tokens that this head reads, fused into one a token. -> [B, T, H]."""
        return head.features({after: out.taps[after] for after in self.config.taps}, out.hidden)


def _lags(own: EagleState, state: DecodeState) -> jax.Array:
    """The active rows of at least two tokens for which the target must be run again. -> bool[B]."""
    return state.active & (state.lengths >= 2) & ~own.ready


jax.tree_util.register_dataclass(
    Eagle, data_fields=["params", "tokens", "embed"], meta_fields=["config", "tree", "temperature", "prefill_chunk"]
)
