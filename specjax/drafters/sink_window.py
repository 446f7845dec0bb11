"""Self-drafting for long contexts: the whole target, on a compressed copy of its own cache.

The draft sees the first tokens (attention sinks, Xiao et al. 2024) and a recent window; TriForce (Sun et al. 2024)
drafts so. It reads all the weights, so it pays only where the cache outweighs them, and under a :class:`Cascade`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decode.arrays import span
from specjax.decode.numeric import is_int
from specjax.decode.types import DecodeState, Draft
from specjax.drafting.base import Stateless, static
from specjax.drafting.draw_chain import draw_chain
from specjax.models import cache as kv
from specjax.models.cache import KVCache
from specjax.models.model import Model


@static
@dataclasses.dataclass(frozen=True)
class SinkWindow(Stateless):
    """Draws K tokens from the target over ``sink`` first and ``window`` latest entries of its cache.

    The entries are gathered anew each round, which costs a read of sink + window entries; they keep the rotary
    positions they were computed at.
    """

    sink: int = 4
    window: int = 508
    temperature: float | None = None

    def __post_init__(self):
        for name, low in (("sink", 0), ("window", 1)):
            value = getattr(self, name)
            if not is_int(value) or value < low:
                raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")

    def propose(
        self, target: Model, own: tuple, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, tuple, KVCache]:
        kept = min(self.sink + self.window, state.cache.capacity)
        committed = state.lengths - 1  # entries of the target's cache
        small = self._gather(state.cache, committed, kept, kv.room(kept + num_speculative_tokens))

        def next_logits(cache, previous, last, position):
            slots = jnp.minimum(committed, kept) + position - committed  # where this token lands in the small cache
            out = target(last[:, None], kv.with_lengths(cache, slots), positions=position[:, None])
            return out.logits[:, 0], out.cache

        vocab = target.vocab_size
        draft, _ = draw_chain(next_logits, small, state, keys, num_speculative_tokens, vocab, self.temperature)
        return draft, own, state.cache

    def _gather(self, cache: KVCache, committed: jax.Array, kept: int, capacity: int) -> KVCache:
        """The kept entries, sinks first and in order, in a cache of that capacity."""
        index = span(kept)
        latest = committed[:, None] - kept + index  # the last ``kept`` entries
        index = jnp.where((committed[:, None] > kept) & (index >= self.sink), latest, index)  # [B, kept]

        def take(leaf):  # [B, kv_heads, S, ...]
            extra = range(3, leaf.ndim)
            rows = jnp.take_along_axis(leaf, jnp.expand_dims(index[:, None], tuple(extra)), axis=2, mode="clip")
            return jnp.pad(rows, ((0, 0), (0, 0), (0, capacity - kept), *((0, 0) for _ in extra)))

        keys, values = jax.tree.map(take, (cache.keys, cache.values))
        return cache.replace(keys=keys, values=values, lengths=committed)
