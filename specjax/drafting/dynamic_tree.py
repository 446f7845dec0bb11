"""Trees that grow where the draft is sure of itself (Li et al. 2024, EAGLE-2, section 4)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode import sampling
from specjax.decode.arrays import span
from specjax.decode.draft_shape import grown
from specjax.decode.types import Draft
from specjax.drafting.base import static
from specjax.drafting.draw_chain import at_temperature, fit
from specjax.drafting.grow_tree import Level


@static
@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """At every depth the ``breadth`` likeliest nodes get their ``breadth`` likeliest children; of all these the
    ``nodes`` likeliest are proposed. A node's likelihood is the product of q along its path.

    Which tokens stand in it is a function of the text, not a draw, so each is a point mass given its earlier siblings:
    judging one by the q that ranked it would change the output's law.

    Args:
      breadth: nodes that go on at each depth, and children of each.
      nodes: N, tokens that are verified.

    Raises:
      ValueError: unless both are integers of at least 1.
    """

    breadth: int = 8
    nodes: int = 32

    def __post_init__(self):
        for name in ("breadth", "nodes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} of a dynamic tree must be an integer of at least 1, got {value!r}")

    @property
    def most(self) -> int:
        return self.breadth

    def size(self, depth: int) -> int:
        """``nodes``, or as many as there can be, and no fewer than a tree of that depth has."""
        if not depth:
            return 0
        most = self.breadth + (depth - 1) * self.breadth**2
        return max(depth, min(self.nodes, most))

    def fed(self, depth: int) -> int:
        return max(depth - 1, 0) * self.breadth

    def grow(self, step, logits, carry, state, keys, depth, vocab, temperature=None):
        """As ``grow.Tree.grow``; nothing is drawn, so keys and temperature play no part but for what filters leave."""
        del keys
        params = at_temperature(state.request.sampling, temperature)
        rows, width = len(logits), self.breadth
        everyone = jnp.arange(rows, dtype=jnp.int32)[:, None]

        def children(logits, score, path):
            """The likeliest ones of each of W nodes: tokens and scores, [B, W, breadth]."""
            context = state.context(path)
            log_q = jnp.log(sampling.normalised(sampling.ranked(fit(logits, vocab), params, context)))
            best, tokens = lax.top_k(jnp.where(jnp.isnan(log_q), -jnp.inf, log_q), width)
            return tokens.astype(jnp.int32), score[..., None] + best

        tokens, score = children(logits[:, None], jnp.zeros((rows, 1), jnp.float32), jnp.zeros((rows, 1, 0), jnp.int32))
        tokens, score = tokens[:, 0], score[:, 0]  # [B, M] of all nodes so far
        parents = jnp.full((rows, width), -1, jnp.int32)  # [B, M]; -1 is the root
        front = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))  # [B, breadth] those that go on
        path = tokens[..., None]  # [B, breadth, depth]
        sees = jnp.broadcast_to(jnp.eye(width, dtype=bool), (rows, width, width))  # [B, breadth, fed]
        place = jnp.zeros((rows, width), jnp.int32)  # of each one's parent in the front before
        for level in range(1, depth):
            asked = Level(level, place, (level - 1) * width, sees)
            logits, carry = step(carry, tokens[everyone, front], asked)
            new, new_score = children(logits, score[everyone, front], path)  # [B, breadth, breadth]
            first = tokens.shape[1]
            parents = jnp.concatenate([parents, jnp.repeat(front, width, axis=1)], axis=1)
            tokens = jnp.concatenate([tokens, new.reshape(rows, -1)], axis=1)
            score = jnp.concatenate([score, new_score.reshape(rows, -1)], axis=1)
            chosen = lax.top_k(new_score.reshape(rows, -1), width)[1]  # [B, breadth] of breadth^2
            front, place = first + chosen, chosen // width
            path = jnp.concatenate([path[everyone, place], tokens[everyone, front][..., None]], axis=2)
            own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (rows, width, width))
            sees = jnp.concatenate([sees[everyone, place], own], axis=2)
        return _best(tokens, score, parents, self.size(depth)), carry


def _best(tokens: jax.Array, score: jax.Array, parents: jax.Array, size: int) -> Draft:
    """The ``size`` nodes of highest score among [B, M]. None scores higher than its parent, so they make a tree."""
    count = tokens.shape[1]
    kept = jnp.sort(lax.top_k(score, min(size, count))[1], axis=1)  # a parent comes before its children
    reached = span(count)[..., None] >= kept[:, None]  # [B, M, N]
    number = jnp.sum(reached, axis=2, dtype=jnp.int32)  # [B, M] of kept nodes up to each
    above = jnp.take_along_axis(parents, kept, axis=1)  # [B, N]
    above = jnp.where(above < 0, 0, jnp.take_along_axis(number, jnp.maximum(above, 0), axis=1))
    tokens, score = (jnp.take_along_axis(x, kept, axis=1) for x in (tokens, score))
    more = ((0, 0), (0, size - kept.shape[1]))
    shape = grown(jnp.pad(above, more).astype(jnp.int32))
    return Draft(jnp.pad(tokens, more), jnp.pad(score > -jnp.inf, more), None, shape)
