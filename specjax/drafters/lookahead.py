"""Lookahead decoding: what the target answers to a window of guesses is drafted where it fits (Fu et al. 2024).

Jacobi decoding throws away what the target answers to a wrong guess. Here each column of guesses goes on for K calls, a
token a call, so that what it then holds follows from itself; such an n-gram is proposed where its first token comes up.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.arrays import span, where_rows
from specjax.decode.draft_shape import FixedTreeShape
from specjax.decode.sampling import NO_TOKEN
from specjax.decode.types import DecodeState, Draft, Outcome, Plan
from specjax.drafting.base import FixedWidth, static
from specjax.models.cache import KVCache
from specjax.models.model import Model


class Trajectory(NamedTuple):
    window: jax.Array  # i32[B, K, W] the guesses of the last K calls, oldest first; NO_TOKEN before the first round
    pool: jax.Array  # i32[B, S, K+1] n-grams in a ring; NO_TOKEN where there is none
    next: jax.Array  # i32[B] where the ring goes on


@static
@dataclasses.dataclass(frozen=True)
class Lookahead(FixedWidth):
    """Drafts n-grams of K + 1 tokens that the target itself once gave; at no call of its own, but in a wide block.

    One tree holds both branches of the paper. In the window the oldest guesses are a chain, from each of which the
    later ones of its column lead on; the target's answer to the last of these makes a new n-gram. Beside it stand, as
    chains of K, the ``guesses`` latest n-grams that begin with the row's last token. So the block has
    (window + guesses) * K tokens beside that. What of the window is at most K deep is judged like any draft: as in
    Jacobi decoding a guess may be right.

    Its proposals depend on its history, so it is exempt from the law that a fresh start would propose the same. They
    are point masses: whatever it proposes, the text is that of plain decoding.

    Args:
      window: W, columns of guesses, and so n-grams found a round.
      guesses: n-grams proposed at most (the paper's G).
      slots: n-grams a row remembers; the oldest make room for new ones.

    Raises:
      ValueError: unless all are integers of at least 1, and the pool holds a round's n-grams and proposals.
    """

    window: int = 8
    guesses: int = 8
    slots: int = 1024

    def __post_init__(self):
        sizes = self.window, self.guesses, self.slots
        if not all(isinstance(x, int) and x >= 1 for x in sizes) or self.slots < max(self.window, self.guesses):
            raise ValueError(
                "lookahead needs integers window and guesses of at least 1, and as many slots as either, got "
                f"window={self.window!r}, guesses={self.guesses!r}, slots={self.slots!r}"
            )

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        del target
        block = 1 + (self.guesses + self.window) * num_speculative_tokens
        return Plan((block,), trees=num_speculative_tokens > 0, gives_probs=False)

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> Trajectory:
        del target, capacity
        window = jnp.full((batch, num_speculative_tokens, self.window), NO_TOKEN, jnp.int32)
        pool = jnp.full((batch, self.slots, num_speculative_tokens + 1), NO_TOKEN, jnp.int32)
        return Trajectory(window, pool, jnp.zeros(batch, jnp.int32))

    def propose(
        self, target: Model, own: Trajectory, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, Trajectory, KVCache]:
        del target, keys
        size = num_speculative_tokens
        rows = jnp.arange(len(state.lengths), dtype=jnp.int32)
        # The first guesses are tokens from here and there in the prompt.
        scattered = 7 * span(size * self.window) % state.lengths[:, None]
        begun = jnp.take_along_axis(state.tokens, scattered, axis=1).reshape(own.window.shape)
        window = jnp.where(own.window == NO_TOKEN, begun, own.window)
        # A row that sits out begins when it is its turn, not when a neighbour happens to ask.
        own = own._replace(window=jnp.where(state.active[:, None, None], window, own.window))
        last = state.tokens[rows, state.lengths - 1]
        ngrams, found = jax.vmap(self.matches)(own.pool, own.next, last)
        tokens = jnp.concatenate([window.reshape(len(rows), -1), jnp.maximum(ngrams, 0).reshape(len(rows), -1)], axis=1)
        above, shallow = self.tree(size)
        judged = jnp.broadcast_to(shallow.ravel(), (len(rows), shallow.size))
        valid = jnp.concatenate([judged, jnp.repeat(found, size, axis=1)], axis=1)
        # Beside a drafter of narrower blocks too: the answers to the window are the point.
        run_at_least = jnp.full(len(rows), size * self.window, jnp.int32)
        return Draft(tokens, valid, None, FixedTreeShape(above), run_at_least), own, state.cache

    def commit(self, target: Model, own: Trajectory, state: DecodeState, outcome: Outcome | None) -> Trajectory:
        del target, state
        if outcome is None:  # cut back, and guesses stay guesses
            return own
        _, size, _ = own.window.shape
        count = size * self.window
        asked = outcome.draft.tokens[:, :count].reshape(own.window.shape)
        # Another drafter's may have been verified instead, or the row was idle: then nothing was learned.
        mine = jnp.all(asked == own.window, axis=(1, 2)) & outcome.draft.valid[:, 0]
        answers = outcome.answers[:, 1 : 1 + count].reshape(own.window.shape)[:, -1:]
        grown = jnp.concatenate([own.window, answers], axis=1)  # [B, K+1, W]
        pool, at = jax.vmap(self.remember)(own.pool, own.next, grown.swapaxes(1, 2))
        new = Trajectory(grown[:, 1:], pool, at)
        return where_rows(mine, new, own)

    def tree(self, size: int) -> tuple[tuple[int, ...], np.ndarray]:
        """Parents of the N nodes, and which nodes of the window are at most K deep.

        The window stands first, call by call, then the chains.

        Returns:
          N numbers, and bool[K, W].
        """
        node = 1 + np.arange((self.window + self.guesses) * size)
        window, chains = node[: self.window * size].reshape(size, -1), node[self.window * size :].reshape(-1, size)
        above_window = np.concatenate([np.arange(self.window)[None], window[:-1]])
        above_chains = np.where(np.arange(size) == 0, 0, chains - 1)
        depth = 1 + np.arange(self.window) + np.arange(size)[:, None]
        return tuple(np.concatenate([above_window.ravel(), above_chains.ravel()]).tolist()), depth <= size

    def matches(self, pool: jax.Array, at: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What follows ``last`` i32[] in a row's n-grams that begin with it, the latest first.

        Returns:
          i32[guesses, K], and bool[guesses] which are such.
        """
        age = (jnp.arange(self.slots, dtype=jnp.int32) - at) % self.slots  # the latest is the highest
        rank, which = jax.lax.top_k(jnp.where(pool[:, 0] == last, age + 1, 0), self.guesses)
        return pool[which, 1:], rank > 0

    def remember(self, pool: jax.Array, at: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A row's pool i32[S, K+1] with new n-grams i32[W, K+1] in it, each once, and where it goes on."""
        known = jnp.any(jnp.all(pool[:, None] == new[None], axis=2), axis=1)
        pool = jnp.where(known[:, None], NO_TOKEN, pool)
        again = jnp.triu(jnp.all(new[:, None] == new[None], axis=2), 1)  # [W, W] a later one is the same
        new = jnp.where(jnp.any(again, axis=1)[:, None], NO_TOKEN, new)
        places = (at + jnp.arange(self.window, dtype=jnp.int32)) % self.slots
        return pool.at[places].set(new), (at + self.window) % self.slots
