"""Lookahead decoding: n-grams that grow from the target's answers to guesses are drafted later (Fu et al. 2024).

Jacobi decoding throws away the target's answers to wrong guesses. Lookahead decoding keeps them in a window of guesses,
W columns wide and K rows high. Every call of the target adds one token to each column: the target's answer. After K
calls each token of a column is the target's answer to the tokens above it in the same column. A column and its newest
answer are an n-gram of K + 1 tokens. The n-gram is proposed later, wherever the text ends with its first token.

The window, for W = 4 columns and K = 3 calls, after the last committed token e:

    depth below e      0   1   2   3   4   5   6   7
    oldest guesses     e   a0  a1  a2  a3                     a chain after e
    one call later             b0  b1  b2  b3                 b0 stands below a0, b1 below a1, ...
    latest call                    c0  c1  c2  c3             c0 stands below b0, ...
    new answers                        d0  d1  d2  d3         the target's answers to the latest guesses

    Column 0 is a0 b0 c0. With the answer d0 the column makes the n-gram a0 b0 c0 d0.
    The next round's window has the rows b, c and d.

A guess attends to the text, to the oldest guesses up to its column, and to the guesses above it in its column: b1 sees
e, a0, a1 and itself. Beside the window the same tree holds the n-grams that begin with e, each as a chain of K tokens
below e.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.arrays import span, where_rows
from specjax.decode.draft_shape import FixedTreeShape
from specjax.decode.numeric import is_int
from specjax.decode.sampling import NO_TOKEN
from specjax.decode.types import DecodeState, Draft, Outcome, Plan
from specjax.drafting.base import FixedWidth, static
from specjax.models.cache import KVCache
from specjax.models.model import Model


class Trajectory(NamedTuple):
    """The guesses and n-grams of each row. S is the number of n-grams that a row remembers."""

    # i32[B, K, W] The guesses of the last K calls, the oldest call first. NO_TOKEN before the first round.
    window: jax.Array
    # i32[B, S, K+1] The n-grams, in a ring. NO_TOKEN in an empty slot.
    pool: jax.Array
    # i32[B] The slot of the ring that is written next.
    next: jax.Array


@static
@dataclasses.dataclass(frozen=True)
class Lookahead(FixedWidth):
    """Drafts n-grams of K + 1 tokens that the target itself gave before. Costs no extra call, but a wide block.

    One tree holds both branches of the paper: the window of guesses, which the picture at the top of this file shows,
    and beside the window the ``guesses`` latest n-grams that begin with the row's last token. The block has
    1 + (window + guesses) * K tokens. Guesses that are at most K deep are judged like any draft, because a guess may be
    right, as in Jacobi decoding.

    The proposals depend on the row's history, so Lookahead is exempt from the law that a fresh start would propose the
    same. All proposals are point masses, so with any proposals the text is that of plain decoding.

    Args:
      window: W, how many columns of guesses there are. Each round finds up to W n-grams, one a column.
      guesses: how many n-grams are proposed at most (the paper's G).
      slots: S, how many n-grams a row remembers. The oldest make room for new ones.

    Raises:
      ValueError: unless all three are integers of at least 1, and ``slots`` is at least ``window`` and ``guesses``.
    """

    window: int = 8
    guesses: int = 8
    slots: int = 1024

    def __post_init__(self):
        sizes = self.window, self.guesses, self.slots
        if not all(is_int(x) and x >= 1 for x in sizes) or self.slots < max(self.window, self.guesses):
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
        # The first guesses are tokens from scattered places of the text. The factor 7 spreads the places.
        scattered = 7 * span(size * self.window) % state.lengths[:, None]
        begun = jnp.take_along_axis(state.tokens, scattered, axis=1).reshape(own.window.shape)
        window = jnp.where(own.window == NO_TOKEN, begun, own.window)
        # An idle row gets its first guesses when it becomes active, not when another row of its batch proposes.
        own = own._replace(window=jnp.where(state.active[:, None, None], window, own.window))
        last = state.tokens[rows, state.lengths - 1]
        ngrams, found = jax.vmap(self.matches)(own.pool, own.next, last)
        tokens = jnp.concatenate([window.reshape(len(rows), -1), jnp.maximum(ngrams, 0).reshape(len(rows), -1)], axis=1)
        above, shallow = self.tree(size)
        judged = jnp.broadcast_to(shallow.ravel(), (len(rows), shallow.size))
        valid = jnp.concatenate([judged, jnp.repeat(found, size, axis=1)], axis=1)
        # The target must answer the whole window. Inside FirstOf the other drafter may allow narrower blocks.
        run_at_least = jnp.full(len(rows), size * self.window, jnp.int32)
        return Draft(tokens, valid, None, FixedTreeShape(above), run_at_least), own, state.cache

    def commit(self, target: Model, own: Trajectory, state: DecodeState, outcome: Outcome | None) -> Trajectory:
        del target, state
        if outcome is None:  # the rows were only cut back; a guess need not fit the text, so all guesses stay
            return own
        _, size, _ = own.window.shape
        count = size * self.window
        asked = outcome.draft.tokens[:, :count].reshape(own.window.shape)
        # The verified draft may be another drafter's, or the row was idle. Such a row learns nothing.
        learned = jnp.all(asked == own.window, axis=(1, 2)) & outcome.draft.valid[:, 0]
        answers = outcome.answers[:, 1 : 1 + count].reshape(own.window.shape)[:, -1:]
        grown = jnp.concatenate([own.window, answers], axis=1)  # [B, K+1, W]
        pool, following = jax.vmap(self.remember)(own.pool, own.next, grown.swapaxes(1, 2))
        new = Trajectory(grown[:, 1:], pool, following)
        return where_rows(learned, new, own)

    def tree(self, size: int) -> tuple[tuple[int, ...], np.ndarray]:
        """The tree of a block: the window's nodes first, row by row, then the n-grams' chains.

        Args:
          size: K.

        Returns:
          The parent node of each of the N tokens, and bool[K, W], which nodes of the window are at most K deep.
        """
        node = 1 + np.arange((self.window + self.guesses) * size)
        window, chains = node[: self.window * size].reshape(size, -1), node[self.window * size :].reshape(-1, size)
        above_window = np.concatenate([np.arange(self.window)[None], window[:-1]])
        above_chains = np.where(np.arange(size) == 0, 0, chains - 1)
        depth = 1 + np.arange(self.window) + np.arange(size)[:, None]
        return tuple(np.concatenate([above_window.ravel(), above_chains.ravel()]).tolist()), depth <= size

    def matches(self, pool: jax.Array, following: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The continuations of a row's last token: the rest of each n-gram that begins with this token, latest first.

        Args:
          pool: i32[S, K+1], the row's n-grams.
          following: i32[], the slot of the ring that is written next.
          last: i32[], the row's last token.

        Returns:
          i32[guesses, K] continuations, and bool[guesses], which of them exist.
        """
        order = (jnp.arange(self.slots, dtype=jnp.int32) - following) % self.slots  # the latest slot has the highest
        rank, which = jax.lax.top_k(jnp.where(pool[:, 0] == last, order + 1, 0), self.guesses)
        return pool[which, 1:], rank > 0

    def remember(self, pool: jax.Array, following: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Writes new n-grams into a row's pool, so that the pool holds each n-gram once.

        Args:
          pool: i32[S, K+1], the row's n-grams.
          following: i32[], the slot of the ring that is written next.
          new: i32[W, K+1], the new n-grams.

        Returns:
          The new pool, and the slot that is written next.
        """
        known = jnp.any(jnp.all(pool[:, None] == new[None], axis=2), axis=1)
        pool = jnp.where(known[:, None], NO_TOKEN, pool)
        again = jnp.triu(jnp.all(new[:, None] == new[None], axis=2), 1)  # [W, W] whether a later one is the same
        new = jnp.where(jnp.any(again, axis=1)[:, None], NO_TOKEN, new)
        places = (following + jnp.arange(self.window, dtype=jnp.int32)) % self.slots
        return pool.at[places].set(new), (following + self.window) % self.slots
