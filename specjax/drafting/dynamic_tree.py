"""Trees that grow where the draft's probabilities are high (Li et al. 2024, EAGLE-2, section 4)."""

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

ROOT = -1  # the parent of the first level's nodes, while a tree grows


@static
@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """Grows the likeliest nodes: a node's likelihood is the product of q along its path.

    At every depth the ``breadth`` likeliest nodes get their ``breadth`` likeliest children. Of all nodes the ``nodes``
    likeliest are proposed.

    The tokens of the tree follow from the text and are not drawn. So each token is a point mass given its earlier
    siblings. To judge a token by the q that ranked it would change the distribution of the output.

    Args:
      breadth: how many nodes of each depth get children, and how many children each of them gets.
      nodes: N, how many tokens are verified.

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
        """Children of one node."""
        return self.breadth

    def size(self, depth: int) -> int:
        """N for a tree ``depth`` deep: ``nodes``, but at most as many as can grow and at least ``depth``."""
        if not depth:
            return 0
        grown_nodes = self.breadth + (depth - 1) * self.breadth**2
        return max(depth, min(self.nodes, grown_nodes))

    def fed(self, depth: int) -> int:
        """Nodes that are fed to the draft, the root not counted."""
        return max(depth - 1, 0) * self.breadth

    def grow(self, step, logits, carry, state, keys, depth, vocab, temperature=None):
        """Grows a tree: see :meth:`specjax.drafting.grow_tree.Tree.grow`.

        Nothing is drawn, so the keys are not used. The temperature and the filters only change q, by which the nodes
        are ranked. For q a temperature of 0 counts as 1.
        """
        del keys
        params = at_temperature(state.request.sampling, temperature)
        rows, width = len(logits), self.breadth
        everyone = jnp.arange(rows, dtype=jnp.int32)[:, None]

        def children(logits, score, path):
            """The likeliest children of each of W nodes: their tokens and scores, [B, W, breadth]."""
            context = state.context(path)
            log_q = jnp.log(sampling.normalised(sampling.ranked(fit(logits, vocab), params, context)))
            best, tokens = lax.top_k(jnp.where(jnp.isnan(log_q), -jnp.inf, log_q), width)
            return tokens.astype(jnp.int32), score[..., None] + best

        tokens, score = children(logits[:, None], jnp.zeros((rows, 1), jnp.float32), jnp.zeros((rows, 1, 0), jnp.int32))
        # M is the number of nodes grown so far. The front holds the nodes of the newest level that get children.
        tokens, score = tokens[:, 0], score[:, 0]  # [B, M]
        parents = jnp.full((rows, width), ROOT, jnp.int32)  # [B, M]
        front = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))  # [B, breadth] among the M nodes
        path = tokens[..., None]  # [B, breadth, depth] the tokens up to each node of the front
        sees = jnp.broadcast_to(jnp.eye(width, dtype=bool), (rows, width, width))  # [B, breadth, fed]
        place = jnp.zeros((rows, width), jnp.int32)  # [B, breadth] the parent's place in the front before
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
            itself = jnp.broadcast_to(jnp.eye(width, dtype=bool), (rows, width, width))
            sees = jnp.concatenate([sees[everyone, place], itself], axis=2)
        return _best(tokens, score, parents, self.size(depth)), carry


def _best(tokens: jax.Array, score: jax.Array, parents: jax.Array, size: int) -> Draft:
    """The draft of the ``size`` nodes with the highest scores. No node scores above its parent, so they are a tree.

    Args:
      tokens: i32[B, M], the grown nodes' tokens.
      score: f32[B, M], the logarithm of each node's likelihood.
      parents: i32[B, M], the parent of each node among the M nodes, or ROOT.
      size: N. If M is smaller, the draft is padded with invalid nodes.
    """
    count = tokens.shape[1]
    kept = jnp.sort(lax.top_k(score, min(size, count))[1], axis=1)  # a parent comes before its children
    reached = span(count)[..., None] >= kept[:, None]  # [B, M, N]
    number = jnp.sum(reached, axis=2, dtype=jnp.int32)  # [B, M] how many kept nodes there are up to each node
    above = jnp.take_along_axis(parents, kept, axis=1)  # [B, N]
    above = jnp.where(above == ROOT, 0, jnp.take_along_axis(number, jnp.maximum(above, 0), axis=1))
    tokens, score = (jnp.take_along_axis(x, kept, axis=1) for x in (tokens, score))
    more = ((0, 0), (0, size - kept.shape[1]))
    shape = grown(jnp.pad(above, more).astype(jnp.int32))
    return Draft(jnp.pad(tokens, more), jnp.pad(score > -jnp.inf, more), None, shape)
