"""EAGLE: a trained head drafts from the target's hidden states, a chain or a tree (Li et al. 2024, 2025)."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode.arrays import row_at, span
from specjax.decode.prefill import check_chunk
from specjax.decode.types import DecodeState, Draft, Outcome, Plan
from specjax.drafting.draw_chain import draw_chain, spreading
from specjax.drafting.grow_tree import ChainOrTree, Level, Tree
from specjax.drafting.topology import Topology
from specjax.models import cache as kv
from specjax.models import modules, tuning
from specjax.models.cache import KVCache
from specjax.models.heads import eagle3_head
from specjax.models.heads.eagle1_head import Eagle1Head, Eagle1HeadConfig
from specjax.models.heads.eagle3_head import Eagle3Head, Eagle3HeadConfig
from specjax.models.model import Model, Output

Head = Eagle3Head | Eagle1Head


class EagleState(NamedTuple):
    """Entry j joins the target's states at token j with token j + 1, so n committed tokens make n - 1 entries."""

    cache: KVCache  # the first n - 2 entries if the row is ready; its lengths say how many there are
    feature: jax.Array  # [B, H] the target's fused states for the next entry
    ready: jax.Array  # bool[B] whether ``feature`` is that


@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no one answer to ==
class Eagle(ChainOrTree):
    """Draws K tokens one after the other, each from the head's own last output, or grows a tree of them.

    It reads the prompt along with the target. With a row that it could not follow, as under a cascade, it catches up
    (``resume``): the target is asked for its states again, ``prefill_chunk`` tokens at a time.

    Args:
      config: the head's shape: an ``Eagle3HeadConfig``, or an ``Eagle1HeadConfig`` (EAGLE and EAGLE-2).
      params: its weights, the tree of ``modules.structure(config.module, config)``.
      tokens: i32[D], the target's id of each token that the head can draft; None: all, as they are.
      tree: None for a chain; how a tree grows (``FixedTree``, ``DynamicTree``), its topology, or its widths.
      temperature: replaces the request's while drafting.
      prefill_chunk: tokens fed at a time when the head is behind; None: 512, on a CPU 64.
      embed: [V, H], where the head has an embedding of its own; None: the target's.
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
        c, own = target.config, self.config
        if own.layer.hidden_size != c.hidden_size:
            raise ValueError(
                f"this head reads hidden states of size {own.layer.hidden_size}, but the target's are {c.hidden_size}: "
                "it was trained for another model"
            )
        if not all(0 <= after <= c.num_hidden_layers for after in own.taps):
            raise ValueError(f"this head reads after layers {own.taps}, but the target has {c.num_hidden_layers}")
        return super().plan(target, num_speculative_tokens)._replace(taps=own.taps)

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> EagleState:
        room = kv.room(capacity + self.room(num_speculative_tokens))
        cache = eagle3_head.alloc_cache(self.config, batch, room, target.dtype)
        feature = jnp.zeros((batch, target.hidden_size), target.dtype)
        return EagleState(cache, feature, jnp.zeros(batch, bool))

    def follow(self, target: Model, own: EagleState, state: DecodeState, starts: jax.Array, out: Output) -> EagleState:
        head = self._head()
        size = out.hidden.shape[1]
        tokens = jnp.take_along_axis(state.tokens, starts[:, None] + 1 + span(size), axis=1, mode="clip")
        features, everyone = self._features(head, out), jnp.ones_like(own.ready)
        return self._extend(target, head, own, starts, features, tokens, state.request.prompt_lengths - 2, everyone)

    def resume(self, target: Model, own: EagleState, state: DecodeState) -> EagleState:
        """Makes every active row of at least two tokens ready."""
        head = self._head()
        last = state.tokens.shape[1] - 1  # under a cascade the model's cache is longer than the head's
        size = min(tuning.prefill_chunk(self.prefill_chunk), last)

        def behind(own: EagleState):
            return jnp.any(_lags(own, state))

        def feed(own: EagleState) -> EagleState:
            # Near the end of the buffers a chunk starts early, over entries that it makes once more.
            starts = jnp.minimum(own.cache.lengths, last - size)
            tokens = jnp.take_along_axis(state.tokens, starts[:, None] + span(size + 1), axis=1)
            out = target(tokens[:, :-1], kv.with_lengths(state.cache, starts), with_logits=False, taps=self.config.taps)
            features, lags = self._features(head, out), _lags(own, state)
            return self._extend(target, head, own, starts, features, tokens[:, 1:], state.lengths - 2, lags)

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
        wanted = state.lengths - 2
        if outcome is None:  # no states came with it, and the last entry's token may have changed
            kept = jnp.clip(own.cache.lengths, 0, jnp.maximum(wanted - 1, 0))
            return own._replace(cache=kv.with_lengths(own.cache, kept), ready=jnp.zeros_like(own.ready))
        head = self._head()
        features = jnp.concatenate([own.feature[:, None], self._features(head, outcome)], axis=1)  # [B, K+2, H]
        # They are of the tokens from n - 2 on, n as before the round; a row of one token has none there yet.
        before = state.lengths - outcome.accepted - 1
        alone = (before == 1)[:, None]
        features = jnp.where(alone[..., None], jnp.roll(features, -1, axis=1), features)
        starts = jnp.maximum(before - 2, 0)
        index = starts[:, None] + 1 + span(features.shape[1] - 1)
        tokens = jnp.take_along_axis(state.tokens, index, axis=1, mode="clip")
        rows = state.active & (own.ready | alone[:, 0])
        own = self._extend(target, head, own, starts, features, tokens, wanted, rows)
        return own._replace(ready=own.ready & state.active)

    def _chain(self, target: Model, head: Head, own: EagleState, state: DecodeState, keys: jax.Array, size: int):
        spread = spreading(self.tokens, target.vocab_size)

        def next_logits(carry, previous, last, position):
            feature, cache = carry
            at = kv.with_lengths(cache, jnp.maximum(position - 1, 0))
            hidden, cache = head(self._embedded(target, last)[:, None], feature[:, None], at)
            return spread(head.head(hidden))[:, 0], (hidden[:, 0], cache)

        first, vocab = (own.feature, own.cache), target.vocab_size
        draft, (_, cache) = draw_chain(next_logits, first, state, keys, size, vocab, self.temperature)
        return draft, cache

    def _tree(self, target: Model, head: Head, own: EagleState, state: DecodeState, keys: jax.Array, depth: int):
        spread = spreading(self.tokens, target.vocab_size)
        root = jnp.maximum(state.lengths - 2, 0)  # the entry of the last committed token; its tree follows
        rows = jnp.arange(root.shape[0], dtype=jnp.int32)

        def step(carry, tokens: jax.Array, level: Level):
            above, cache = carry  # [B, W', H] the outputs of the level before
            at = kv.with_lengths(cache, root + 1 + level.fed)
            features = above[rows[:, None], level.parents]
            hidden, cache = head(
                self._embedded(target, tokens), features, at, *level.attention(root + 1, cache.capacity)
            )
            return spread(head.head(hidden)), (hidden, cache)

        last = state.tokens[rows, state.lengths - 1]
        grown: Any = self.tree
        at_root = kv.with_lengths(own.cache, root)
        hidden, cache = head(self._embedded(target, last)[:, None], own.feature[:, None], at_root)
        logits, vocab = spread(head.head(hidden))[:, 0], target.vocab_size
        draft, (_, cache) = grown.grow(step, logits, (hidden, cache), state, keys, depth, vocab, self.temperature)
        return draft, cache

    def _embedded(self, target: Model, tokens: jax.Array) -> jax.Array:
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
        """The state once the entries from ``starts`` on are made of next tokens i32[B, T] and fused states [B, T+, H].

        Rows bool[B] take it, up to ``wanted`` i32[B] entries; those whose next states are among these are ready.
        """
        size = tokens.shape[1]
        _, cache = head(self._embedded(target, tokens), features[:, :size], kv.with_lengths(own.cache, starts))
        # A row that was there before keeps what it had: later blocks of the prompt are padding to it.
        taken = rows & (starts <= wanted)
        reached = taken & (wanted < starts + features.shape[1])
        feature = row_at(features, jnp.clip(wanted - starts, 0, features.shape[1] - 1))
        lengths = jnp.where(taken, jnp.minimum(starts + size, wanted), own.cache.lengths)
        return EagleState(
            kv.with_lengths(cache, lengths), jnp.where(reached[:, None], feature, own.feature), own.ready | reached
        )

    def _head(self) -> Head:
        return modules.merge(self.config.module, self.config, self.params)

    def _features(self, head: Head, out: Output | Outcome) -> jax.Array:
        """Of what was seen, the states that this head reads, as one. -> [B, T, H]."""
        return head.features({after: out.taps[after] for after in self.config.taps}, out.hidden)


def _lags(own: EagleState, state: DecodeState) -> jax.Array:
    """Which active rows must be asked about again. -> bool[B]."""
    return state.active & (state.lengths >= 2) & ~own.ready


jax.tree_util.register_dataclass(
    Eagle, data_fields=["params", "tokens", "embed"], meta_fields=["config", "tree", "temperature", "prefill_chunk"]
)
