"""Trees that grow where the draft's probabilities are high (Li et al. 2024, EAGLE-2, section 4)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode import sampling
from specjax.decode.arrays import span
from specjax.decode.draft_shape import GrownTreeShape
from specjax.decode.likeliest import top_k
from specjax.decode.numeric import check_count
from specjax.decode.types import Draft
from specjax.drafting.base import static
from specjax.drafting.draw_chain import at_temperature, spreading
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
            check_count(f"{name} of a dynamic tree", getattr(self, name))

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

    def grow(self, step, logits, carry, state, keys, depth, vocab, temperature=None, ids=None):
        """Grows a tree: see :meth:`specjax.drafting.grow_tree.Tree.grow`.

        Nothing is drawn, so the keys are not used. The temperature and the filters only change q, by which the nodes
        are ranked. For q a temperature of 0 counts as 1. The candidates of a node are the tokens that the draft knows;
        arrays over the whole vocabulary are made only for parameters that name tokens.
        """
        del keys
        params = at_temperature(state.request.sampling, temperature)
        rows, width = len(logits), self.breadth
        everyone = jnp.arange(rows, dtype=jnp.int32)[:, None]
        compact = ids is not None and len(ids) >= width and not sampling.names_tokens(params)
        columns = (lambda logits: logits) if compact else spreading(ids, vocab)

        def children(logits, score, path):
            """The likeliest children of each of W nodes: their tokens and scores, [B, W, breadth]."""
            scores = sampling.ranked(columns(logits), params, state.context(path))
            best, places = top_k(scores, width)
            log_q = best - jnp.log(jnp.sum(jnp.exp(scores), axis=-1, keepdims=True))
            log_q = jnp.where(jnp.isnan(log_q), -jnp.inf, log_q)
            return (ids[places] if compact else places).astype(jnp.int32), score[..., None] + log_q

        new, new_score = children(
            logits[:, None], jnp.zeros((rows, 1), jnp.float32), jnp.zeros((rows, 1, 0), jnp.int32)
        )
        # The front holds the nodes of the newest level that get children. M nodes are grown in all.
        chosen = jnp.broadcast_to(span(width), (rows, width))  # [B, breadth] of the level's nodes
        tokens, score = new[:, 0], new_score[:, 0]  # [B, breadth] of the front
        path = tokens[..., None]  # [B, breadth, depth] the tokens up to each node of the front
        sees = jnp.broadcast_to(jnp.eye(width, dtype=bool), (rows, width, width))  # [B, breadth, fed]
        place = jnp.zeros((rows, width), jnp.int32)  # [B, breadth] the parent's place in the front before
        grown = [Grown(tokens, score, jnp.full((rows, width), ROOT, jnp.int32))]
        first = 0  # the number of the level's first node
        for level in range(1, depth):
            logits, carry = step(carry, tokens, Level(level, place, (level - 1) * width, sees))
            new, new_score = (x.reshape(rows, -1) for x in children(logits, score, path))  # [B, breadth^2]
            grown.append(Grown(new, new_score, jnp.repeat(first + chosen, width, axis=1)))
            first += grown[-2].tokens.shape[1]
            score, chosen = top_k(new_score, width)
            tokens, place = new[everyone, chosen], chosen // width
            path = jnp.concatenate([path[everyone, place], tokens[..., None]], axis=2)
            itself = jnp.broadcast_to(jnp.eye(width, dtype=bool), (rows, width, width))
            sees = jnp.concatenate([sees[everyone, place], itself], axis=2)
        every = jax.tree.map(lambda *levels: jnp.concatenate(levels, axis=1), *grown)
        return _best(every, self.size(depth), depth), carry


class Grown(NamedTuple):
    """M nodes that have grown."""

    # i32[B, M]
    tokens: jax.Array
    # f32[B, M] The logarithm of each node's likelihood.
    score: jax.Array
    # i32[B, M] The parent of each node among the M nodes of all levels, or ROOT.
    parents: jax.Array


def _best(grown: Grown, size: int, depth: int) -> Draft:
    """The draft of the ``size`` nodes with the highest scores. No node scores above its parent, so they are a tree."""
    kept = jnp.sort(lax.top_k(grown.score, size)[1], axis=1)  # [B, N] a parent comes before its children
    tokens, score, parents = (jnp.take_along_axis(x, kept, axis=1) for x in grown)
    number = jnp.where(parents[..., None] == kept[:, None], 1 + span(size)[None], 0)  # [B, N, N]
    above = jnp.sum(number, axis=2, dtype=jnp.int32)
    known, way = jnp.zeros(number.shape, bool), kept  # [B, N, N] whether a node is another or stands below the other
    for _ in range(depth):
        known |= way[..., None] == kept[:, None]
        way = jnp.where(way == ROOT, ROOT, jnp.take_along_axis(grown.parents, jnp.maximum(way, 0), axis=1))
    ancestors = jnp.pad(known, ((0, 0), (1, 0), (1, 0))).at[:, :, 0].set(True)  # node 0 stands above all
    depths = jnp.sum(ancestors, axis=2, dtype=jnp.int32) - 1
    return Draft(tokens, score > -jnp.inf, None, GrownTreeShape(above, ancestors, depths))
