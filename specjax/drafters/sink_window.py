"""Self-drafting for long contexts: the whole target drafts, on a compressed copy of its own cache.

The draft sees the first tokens (attention sinks, Xiao et al. 2024) and a window of recent tokens, as in TriForce (Sun
et al. 2024). A draft step reads all weights of the target. So the method pays only where the cache takes more memory
than the weights, and under a :class:`Cascade`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decode.arrays import span
from specjax.decode.numeric import check_count
from specjax.decode.types import DecodeState, Draft, Plan
from specjax.drafting.base import Stateless, static
from specjax.drafting.draw_chain import check_temperature, draw_chain
from specjax.models import cache as kv
from specjax.models.cache import KVCache
from specjax.models.model import Model, check_no_encoder


@static
@dataclasses.dataclass(frozen=True)
class SinkWindow(Stateless):
    """Draws K tokens from the target, which sees only the first and the latest entries of its cache.

    Each round gathers these entries anew, at the cost of reading sink + window entries. The entries keep the rotary
    positions at which they were computed.

    Args:
      sink: how many of the first entries are seen.
      window: how many of the latest entries are seen.
      temperature: replaces the request's temperature while drafting. None: the request's.

    Raises:
      ValueError: ``sink`` is no integer >= 0, ``window`` is no integer >= 1, or ``temperature`` is no number from 0 on.
    """

    sink: int = 4
    window: int = 508
    temperature: float | None = None

    def __post_init__(self):
        check_count("sink", self.sink, 0)
        check_count("window", self.window)
        check_temperature(self.temperature)

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        check_no_encoder(target, "SinkWindow")
        # The small cache has room for K tokens.
        return super().plan(target, num_speculative_tokens)._replace(shaped_by_size=True)

    def propose(
        self, target: Model, own: tuple, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, tuple, KVCache]:
        kept = min(self.sink + self.window, state.cache.capacity)
        committed = state.lengths - 1  # i32[B] entries of the target's cache
        small = self._gather(state.cache, committed, kept, kv.room(kept + num_speculative_tokens))

        def next_logits(cache, previous, last, position):
            slots = jnp.minimum(committed, kept) + position - committed  # the token's slot in the small cache
            out = target(last[:, None], kv.with_lengths(cache, slots), positions=position[:, None])
            return out.logits[:, 0], out.cache

        vocab = target.vocab_size
        draft, _ = draw_chain(next_logits, small, state, keys, num_speculative_tokens, vocab, self.temperature)
        return draft, own, state.cache

    def _gather(self, cache: KVCache, committed: jax.Array, kept: int, capacity: int) -> KVCache:
        """A small cache of the kept entries: the sinks, then the window, both in the order of their positions.

        Args:
          cache: the target's cache.
          committed: i32[B], how many entries of the target's cache are committed.
          kept: how many entries the small cache begins with, sink + window at most.
          capacity: slots of the small cache.
        """
        index = span(kept)
        latest = committed[:, None] - kept + index  # the last ``kept`` entries
        index = jnp.where((committed[:, None] > kept) & (index >= self.sink), latest, index)  # [B, kept]

        def take(leaf):  # [B, kv_heads, S, ...]
            extra = range(3, leaf.ndim)
            rows = jnp.take_along_axis(leaf, jnp.expand_dims(index[:, None], tuple(extra)), axis=2, mode="clip")
            return jnp.pad(rows, ((0, 0), (0, 0), (0, capacity - kept), *((0, 0) for _ in extra)))

        rows = [tuple(kv.by_rows(buffer, cache.table) for buffer in buffers) for buffers in (cache.keys, cache.values)]
        keys, values = jax.tree.map(take, rows)
        return cache.replace(keys=keys, values=values, lengths=committed, table=None)
