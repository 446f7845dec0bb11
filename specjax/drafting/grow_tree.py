"""Growing a token tree level by level from any function that gives next-token logits. All tree drafters share this."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode import draft_shape, random, sampling
from specjax.decode.draft_shape import FixedTreeShape
from specjax.decode.likeliest import top_k
from specjax.decode.types import DecodeState, Draft, Plan
from specjax.drafting.base import FixedWidth, static
from specjax.drafting.draw_chain import at_temperature, check_temperature, draw_chain, is_greedy, noisy, spreading
from specjax.drafting.topology import Topology, from_widths
from specjax.models.model import Model
from specjax.verify import siblings


class Level(NamedTuple):
    """The W nodes of one depth that have children. One call of the draft is fed these nodes.

    R is B, or 1 if the tree is the same in every row.
    """

    # The depth of the nodes.
    depth: int
    # i[R, W] The place of each node's parent among the nodes of the level before.
    parents: Any
    # How many nodes were fed before this level, the root not counted.
    fed: int
    # bool[R, W, fed + W] Which of the nodes fed before, and then of this level, each node attends to. A node attends to
    # itself.
    sees: Any

    def attention(self, starts: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        """The rotary positions and the attention mask of the level's nodes.

        Args:
          starts: i32[B], the number of cache entries before the tree's first entry.
          capacity: S, slots of the cache.

        Returns:
          i32[B, W] positions, and bool[B, W, S].
        """
        sees = jnp.broadcast_to(self.sees, (len(starts), *self.sees.shape[1:]))
        positions = jnp.broadcast_to(starts[:, None] + self.depth - 1, sees.shape[:2])
        return positions, draft_shape.seen(sees, starts, capacity)


# One call of the draft: from the carry, the tokens i32[B, W] of a level and the level to the logits after each of these
# tokens, f32[B, W, V'], and the new carry.
Step = Callable[[Any, jax.Array, Level], tuple[jax.Array, Any]]


class Tree(Protocol):
    """A way to grow trees. Hashable, and static in jit."""

    @property
    def most(self) -> int:
        """The largest number of children of one node."""
        ...

    def size(self, depth: int) -> int:
        """N, the number of nodes of a tree ``depth`` deep, the root not counted."""
        ...

    def fed(self, depth: int) -> int:
        """How many nodes are fed to the draft while a tree ``depth`` deep grows, the root not counted."""
        ...

    def grow(
        self,
        step: Step,
        logits: jax.Array,
        carry: Any,
        state: DecodeState,
        keys: Any,
        depth: int,
        vocab: int,
        temperature: float | None,
        ids: jax.Array | None = None,
    ) -> tuple[Draft, Any]:
        """Grows a tree of N nodes, ``depth`` deep.

        Args:
          step: one call of the draft for one level. Every node sees the committed text and the nodes above the node.
          logits: f32[B, V'], the logits after each row's last token.
          carry: the carry of the first step.
          state: the round's state.
          keys: key[B], or ``random.Apart`` of them, to draw with (``random.at_children``).
          depth: K.
          vocab: V, the target's vocabulary size. Logits over fewer or more tokens are fitted to V.
          temperature: replaces the request's temperature. None: the request's. At 0 siblings are the best tokens in
            order, each a point mass.
          ids: i32[V'], the token of each logit; other tokens can't be drafted. None: the ids are 0 to V' - 1.

        Returns:
          The draft and the last carry. A node is not valid if there was no token left to draw.
        """
        ...


def tree_of(shape: "Tree | Topology | Sequence[int]") -> Tree:
    """The way to grow a tree that ``shape`` says: a :class:`Tree`, or a fixed topology, or widths.

    Raises:
      ValueError: ``shape`` is anything else, or widths that :func:`from_widths` refuses.
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
    """A drafter with a field ``tree``: None for a chain, or an argument of :func:`tree_of`."""

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
            raise ValueError(
                f"a node of the tree has {most} children, but the vocabulary only {vocab} tokens: give at most as many "
                "children as there are tokens"
            )
        return Plan((1 + self.tree.size(num_speculative_tokens),), trees=num_speculative_tokens > 0)

    def room(self, num_speculative_tokens: int) -> int:
        """How many entries past the committed ones a draft's cache needs room for: the block or the fed tree."""
        if self.tree is None:
            return num_speculative_tokens + 1
        return 1 + max(self.tree.size(num_speculative_tokens), self.tree.fed(num_speculative_tokens))


def drawn_at_once(
    logits: jax.Array,
    tree_of_them: Any,
    state: DecodeState,
    keys: Any,
    num_speculative_tokens: int,
    temperature: float | None,
) -> Draft:
    """Draws a chain or a tree from logits that depend on the depth alone, not on the tokens before.

    Args:
      logits: f32[B, D, V]. Tokens of depth d are drawn from the logits at index d - 1.
      tree_of_them: None for a chain, or how the tree grows.
      state: the round's state.
      keys: key[B] to draw with.
      num_speculative_tokens: K.
      temperature: replaces the request's temperature. None: the request's.

    Returns:
      The draft. Tokens deeper than D are not valid.
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
    """A tree of a fixed shape, whose nodes are drawn under the request's own sampling transforms.

    With plain keys all nodes of one depth share the noise of their absolute position, also if their parents differ.
    That is sound where of each depth only the children of one node are ever judged: given this node, their distribution
    is q. With ``random.Apart`` the children of different nodes are independent draws. A tree of width 1 is the chain of
    :func:`draw_chain` with either.

    Args:
      topology: the shape. A deeper topology is cut to K levels. In a shallower one the first of the deepest leaves goes
        on as a chain.
      with_replacement: if True, siblings are independent draws and may be equal. If False, no two siblings are equal.
    """

    topology: Topology
    with_replacement: bool = False

    @property
    def most(self) -> int:
        """The largest number of children of one node."""
        return int(self.topology.ranks.max()) + 1

    def size(self, depth: int) -> int:
        """N, the number of nodes of the tree ``depth`` deep, the root not counted."""
        return len(self.topology.of_depth(depth).parents) if depth else 0

    def fed(self, depth: int) -> int:
        """An upper bound: all nodes are counted, though leaves are never fed."""
        return self.size(depth)

    def grow(self, step, logits, carry, state, keys, depth, vocab, temperature=None, ids=None):
        """Grows a tree: see :meth:`Tree.grow`."""
        spread = spreading(ids, vocab)
        topology, params = self.topology.of_depth(depth), at_temperature(state.request.sampling, temperature)
        rows, logits = logits.shape[0], logits[:, None]
        tokens, drawn_from = jnp.zeros((rows, 0), jnp.int32), []
        for nodes, level in levels_of(topology):
            if level.depth > 0:
                logits, carry = step(carry, tokens[:, nodes - 1], level)
            on_path = np.array([np.flatnonzero(topology.ancestors[node])[1:] for node in nodes], int)  # [W, depth]
            path = tokens[:, on_path - 1].reshape(rows, len(nodes), level.depth)
            context = state.context(path)
            children = np.flatnonzero(np.isin((-1, *topology.parents), nodes))
            parents = np.searchsorted(nodes, np.array(topology.parents)[children - 1])
            level_keys = random.at_children(keys, state.lengths + level.depth, len(nodes))
            drawn, q = draw_children(
                spread(logits), params, context, level_keys, parents, topology.ranks[children],
                self.with_replacement
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
    """Draws the children of the nodes of one level.

    At temperature 0 the draws are the limit of drawing without replacement: the best tokens in order, each certain
    given the ones before. The distribution at temperature 0 itself has only one token, and could not rank the others.

    Args:
      logits: f32[B, W, V], the logits after each of the W nodes.
      params: the sampling parameters.
      context: the tokens before each of the W nodes.
      keys: key[B, W], the keys of the children of each node. key[B, 1]: all nodes share the noise.
      parents: i[C], the place of each child's parent among the W nodes. Children of one parent stand together.
      ranks: i[C], the rank of each child among its siblings, from 0.
      with_replacement: whether siblings are independent draws.

    Returns:
      The tokens i32[B, C], and the distribution that each token was drawn from given its earlier siblings,
      f32[B, C, V]. If there was nothing to draw, this distribution is 0 or NaN at the token.
    """
    vocab, most = logits.shape[-1], int(ranks.max()) + 1
    scores = sampling.ranked(logits, params, context)
    q = sampling.normalised(scores)  # [B, W, V]
    if with_replacement:

        def of_rank(rank):
            own = random.siblings(keys, jnp.broadcast_to(rank, keys.shape))
            return jnp.argmax(noisy(scores, params, own), axis=-1)

        drawn = jax.vmap(of_rank, out_axes=2)(jnp.arange(most, dtype=jnp.int32))  # [B, W, M]
        given = jnp.broadcast_to(q[:, :, None], (*drawn.shape, vocab))
    else:
        drawn = top_k(noisy(scores, params, keys), most)[1]  # [B, W, M]
        given = jax.vmap(siblings.without_replacement, in_axes=1, out_axes=1)(q, drawn)
    certain = jnp.where(given > 0, jax.nn.one_hot(drawn, vocab, dtype=jnp.float32), 0.0)
    given = jnp.where(is_greedy(params)[..., None], certain, given)
    return drawn[:, parents, ranks].astype(jnp.int32), given[:, parents, ranks]


def levels_of(topology: Topology) -> list[tuple[np.ndarray, Level]]:
    """The levels whose nodes have children, from the root down, each with the numbers i[W] of its nodes."""
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
