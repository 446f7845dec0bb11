"""Growing a token tree level by level from anything that gives next-token logits: what all tree drafters share."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode import draft_shape, random, sampling
from specjax.decode.draft_shape import FixedTreeShape
from specjax.decode.types import DecodeState, Draft, Plan
from specjax.drafting.base import FixedWidth, static
from specjax.drafting.draw_chain import at_temperature, check_temperature, draw_chain, fit, is_greedy, noisy
from specjax.drafting.topology import Topology, from_widths
from specjax.models.model import Model
from specjax.verify import siblings


class Level(NamedTuple):
    """The nodes of one depth that have children: what a draft is asked about in one call. Rows alike have R = 1."""

    depth: int
    parents: Any  # i[R, W] the place of each one's parent in the level before
    fed: int  # nodes fed before this level, the root not counted
    sees: Any  # bool[R, W, fed + W] which of those and of these each node sees, itself included

    def attention(self, starts: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        """Rotary positions i32[B, W] and mask bool[B, W, S] where the tree's entries follow starts i32[B] others."""
        sees = jnp.broadcast_to(self.sees, (len(starts), *self.sees.shape[1:]))
        positions = jnp.broadcast_to(starts[:, None] + self.depth - 1, sees.shape[:2])
        return positions, draft_shape.seen(sees, starts, capacity)


# (carry, tokens i32[B, W], level) -> (logits f32[B, W, V'], carry)
Step = Callable[[Any, jax.Array, Level], tuple[jax.Array, Any]]


class Tree(Protocol):
    """A way to grow trees. Static."""

    @property
    def most(self) -> int:
        """Children of one node."""
        ...

    def size(self, depth: int) -> int:
        """N, the nodes of a tree ``depth`` deep."""
        ...

    def fed(self, depth: int) -> int:
        """Nodes that the draft is asked about, the root not counted."""
        ...

    def grow(
        self,
        step: Step,
        logits: jax.Array,
        carry: Any,
        state: DecodeState,
        keys: jax.Array,
        depth: int,
        vocab: int,
        temperature: float | None,
    ) -> tuple[Draft, Any]:
        """A tree of N nodes, ``depth`` deep.

        Args:
          step: the draft on one level, every node of which sees the committed text and the nodes above it.
          logits: f32[B, V'] after each row's last token.
          carry: what the steps pass on.
          state: the round's.
          keys: key[B] to draw with.
          depth: K.
          vocab: V, the target's; logits of fewer or more tokens are fitted to it.
          temperature: replaces the request's. At 0 siblings are the best tokens in order, each a point mass.

        Returns:
          The draft, its ``valid`` False where there was nothing left to draw, and the last carry.
        """
        ...


def tree_of(shape: "Tree | Topology | Sequence[int]") -> Tree:
    """A tree as it is, or that of a fixed topology or of widths.

    Raises:
      ValueError: for anything else, and as :func:`from_widths`.
    """
    if isinstance(shape, Topology):
        return FixedTree(shape)
    if isinstance(shape, Sequence) and not isinstance(shape, str):
        return FixedTree(from_widths(shape))
    if not hasattr(shape, "grow"):
        raise ValueError(
            f"a tree must be widths such as (3, 2, 1), a Topology, a FixedTree or a DynamicTree, got {shape!r}"
        )
    return shape


class ChainOrTree(FixedWidth):
    """A drafter with a field ``tree``: None for a chain, or what :func:`tree_of` takes."""

    tree: Any
    temperature: Any

    def __post_init__(self):
        check_temperature(self.temperature)
        if self.tree is not None:
            object.__setattr__(self, "tree", tree_of(self.tree))

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        if self.tree is None:
            return super().plan(target, num_speculative_tokens)
        most, vocab = self.tree.most, target.vocab_size
        if most > vocab:
            raise ValueError(f"a node of the tree has {most} children, but the vocabulary only {vocab} tokens")
        return Plan((1 + self.tree.size(num_speculative_tokens),), trees=num_speculative_tokens > 0)

    def room(self, num_speculative_tokens: int) -> int:
        """Entries past the committed ones that a cache needs room for: the block that is verified, or the tree."""
        if self.tree is None:
            return num_speculative_tokens + 1
        return 1 + max(self.tree.size(num_speculative_tokens), self.tree.fed(num_speculative_tokens))


def drawn_at_once(
    logits: jax.Array,
    tree_of_them: Any,
    state: DecodeState,
    keys: jax.Array,
    num_speculative_tokens: int,
    temperature: float | None,
) -> Draft:
    """A chain, or a tree, whose tokens at depth d are drawn from logits f32[B, D, V] at d - 1, whatever stands above.

    What lies deeper than D is not valid.
    """
    last, vocab = logits.shape[1] - 1, logits.shape[-1]

    def next_logits(i, previous, token, position):
        return logits[:, jnp.minimum(i, last)], i + 1

    def step(carry, tokens: jax.Array, level: Level):
        return jnp.broadcast_to(logits[:, min(level.depth, last), None], (*tokens.shape, vocab)), carry

    if tree_of_them is None:
        draft, _ = draw_chain(next_logits, jnp.int32(0), state, keys, num_speculative_tokens, vocab, temperature)
    else:
        draft, _ = tree_of_them.grow(step, logits[:, 0], (), state, keys, num_speculative_tokens, vocab, temperature)
    depths = draft.shape.depths(draft.tokens.shape[1])
    return draft._replace(valid=draft.valid & (depths[:, 1:] <= last + 1))


@static
@dataclasses.dataclass(frozen=True)
class FixedTree:
    """A tree of a fixed shape, each node under the request's own sampling transforms.

    Nodes of one depth share their noise, that of their absolute position, whoever their parents are: only children of
    one node are ever judged, and their law given that node is what q says. So a tree of width 1 is the chain.

    Args:
      topology: cut to K levels; where it has fewer, its first deepest leaf goes on as a chain.
      with_replacement: siblings are independent draws, duplicates and all; else no two are alike.
    """

    topology: Topology
    with_replacement: bool = False

    @property
    def most(self) -> int:
        return int(self.topology.ranks.max()) + 1

    def size(self, depth: int) -> int:
        return len(self.topology.of_depth(depth).parents) if depth else 0

    def fed(self, depth: int) -> int:
        return self.size(depth)  # all but the leaves

    def grow(self, step, logits, carry, state, keys, depth, vocab, temperature=None):
        topology, params = self.topology.of_depth(depth), at_temperature(state.request.sampling, temperature)
        rows, logits = logits.shape[0], logits[:, None]
        tokens, drawn_from = jnp.zeros((rows, 0), jnp.int32), []
        for nodes, level in levels_of(topology):
            if level.depth > 0:
                logits, carry = step(carry, tokens[:, nodes - 1], level)
            way = np.array([np.flatnonzero(topology.ancestors[node])[1:] for node in nodes], int)  # [W, depth]
            path = tokens[:, way - 1].reshape(rows, len(nodes), level.depth)
            context = state.context(path)
            children = np.flatnonzero(np.isin((-1, *topology.parents), nodes))
            parents = np.searchsorted(nodes, np.array(topology.parents)[children - 1])
            at = random.at(keys, state.lengths[:, None] + level.depth)[:, 0]
            drawn, q = draw_children(
                fit(logits, vocab), params, context, at, parents, topology.ranks[children], self.with_replacement
            )
            tokens = jnp.concatenate([tokens, drawn], axis=1)
            drawn_from.append(q)
        probs = jnp.concatenate(drawn_from, axis=1)
        valid = jnp.take_along_axis(probs, tokens[..., None], axis=2)[..., 0] > 0
        shape = FixedTreeShape(topology.parents)
        return Draft(tokens, valid, None if temperature == 0 else probs, shape), carry


def draw_children(
    logits: jax.Array,
    params: sampling.SamplingParams,
    context: sampling.Context,
    keys: jax.Array,
    parents: np.ndarray,
    ranks: np.ndarray,
    with_replacement: bool,
) -> tuple[jax.Array, jax.Array]:
    """The children of one level's nodes.

    At temperature 0 it is the limit of drawing without replacement: the best tokens in order, each certain given
    those before it, which no law at temperature 0 could rank.

    Args:
      logits: f32[B, W, V] at the W nodes.
      params: the sampling parameters.
      context: of the W nodes.
      keys: key[B] of the children's position.
      parents: i[C], the place of each child's parent among the W; those of one parent stand together.
      ranks: i[C], from 0 for each parent's first.
      with_replacement: whether draws are independent.

    Returns:
      Tokens i32[B, C] and what each was drawn from, given its earlier siblings, f32[B, C, V]: zeros or NaN at the
      token where there was nothing to draw.
    """
    vocab, most = logits.shape[-1], int(ranks.max()) + 1
    scores = sampling.ranked(logits, params, context)
    q = sampling.normalised(scores)  # [B, W, V]
    if with_replacement:
        ranks_of = jnp.broadcast_to(jnp.arange(most, dtype=jnp.int32), (len(q), most))
        each = random.siblings(jnp.repeat(keys[:, None], most, 1), ranks_of)  # [B, M]
        drawn = jax.vmap(lambda node: jnp.argmax(noisy(node[:, None], params, each), axis=-1), 1, 1)(scores)
        given = jnp.broadcast_to(q[:, :, None], (*drawn.shape, vocab))
    else:
        drawn = jax.lax.top_k(noisy(scores, params, keys[:, None]), most)[1]  # [B, W, M]
        given = jax.vmap(siblings.without_replacement, in_axes=1, out_axes=1)(q, drawn)
    certain = jnp.where(given > 0, jax.nn.one_hot(drawn, vocab, dtype=jnp.float32), 0.0)
    given = jnp.where(is_greedy(params)[..., None], certain, given)
    return drawn[:, parents, ranks].astype(jnp.int32), given[:, parents, ranks]


def levels_of(topology: Topology) -> list[tuple[np.ndarray, Level]]:
    """What is asked about, level by level, from the root down, with the nodes' numbers i[W]."""
    depths, inner = topology.depths, np.unique(topology.parents)
    levels: list[tuple[np.ndarray, Level]] = []
    for depth in range(topology.depth):
        nodes = inner[depths[inner] == depth]
        above = inner[(depths[inner] < depth) & (inner > 0)]
        before = levels[-1][0] if levels else np.zeros(1, int)
        parents = np.searchsorted(before, np.array((0, *topology.parents))[nodes])
        sees = topology.ancestors[np.ix_(nodes, np.concatenate([above, nodes]))]
        levels.append((nodes, Level(depth, parents[None], len(above), sees[None])))
    return levels
