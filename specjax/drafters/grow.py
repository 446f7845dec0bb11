"""Growing a token tree level by level from anything that gives next-token logits: what all tree drafters share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import random, sampling
from specjax.drafters.sampled import at_temperature, fit
from specjax.topology import Topology
from specjax.types import DecodeState, Draft
from specjax.verify import multi


class Level(NamedTuple):
    """The nodes of one depth that have children: what a draft is asked about in one call. Static."""

    depth: int
    nodes: np.ndarray  # i[W] their numbers
    parents: np.ndarray  # i[W] the place of each one's parent in the level before
    fed: int  # nodes fed before this level, the root not counted
    sees: np.ndarray  # bool[W, fed + W] which of those and of these each node sees, itself included
    way: np.ndarray  # i[W, depth] the nodes on the way to each, itself included
    children: tuple[np.ndarray, np.ndarray]  # i[C] the place of each child's parent among these, and i[C] its rank


# (carry, tokens i32[B, W], level) -> (logits f32[B, W, V'], carry)
Step = Callable[[Any, jax.Array, Level], tuple[jax.Array, Any]]


def grow_tree(
    step: Step,
    logits: jax.Array,
    carry: Any,
    topology: Topology,
    state: DecodeState,
    keys: jax.Array,
    vocab: int,
    temperature: float | None = None,
    with_replacement: bool = False,
) -> tuple[Draft, Any]:
    """A tree of a fixed shape, one call of ``step`` a level, each node under the request's own sampling transforms.

    Nodes of one depth share their noise, that of their absolute position, whoever their parents are: only children of
    one node are ever judged, and their law given that node is what q says. So a tree of width 1 is the chain.

    Args:
      step: the draft on one level, every node of which sees the committed text and the nodes above it.
      logits: f32[B, V'] after each row's last token.
      carry: what the steps pass on.
      topology: the tree.
      state: the round's.
      keys: key[B] to draw with.
      vocab: V, the target's; logits of fewer or more tokens are fitted to it.
      temperature: replaces the request's. At 0 siblings are the best tokens in order, each a point mass.
      with_replacement: siblings are independent draws, duplicates and all; else no two are alike.

    Returns:
      The draft, its ``valid`` False where q left nothing to draw, and the last carry.
    """
    params = at_temperature(state.sampling, temperature)
    logits, drawn_from = logits[:, None], []
    tokens = jnp.zeros((len(logits), 0), jnp.int32)
    for level in levels_of(topology):
        if level.depth > 0:
            logits, carry = step(carry, tokens[:, level.nodes - 1], level)
        path = tokens[:, level.way - 1]  # [B, W, depth]
        context = sampling.Context(state.tokens, state.lengths, state.prompt_lengths, path)
        at = random.at(keys, state.lengths[:, None] + level.depth)[:, 0]
        drawn, q = draw_children(fit(logits, vocab), params, context, at, *level.children, with_replacement)
        tokens = jnp.concatenate([tokens, drawn], axis=1)
        drawn_from.append(q)
    probs = jnp.concatenate(drawn_from, axis=1)
    valid = jnp.take_along_axis(probs, tokens[..., None], axis=2)[..., 0] > 0
    shape = jnp.broadcast_to(jnp.array(topology.parents, jnp.int32), tokens.shape)
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
    greedy = (params.temperature == 0)[:, None, None]
    warm = params._replace(temperature=jnp.where(params.temperature == 0, 1.0, params.temperature))
    logits = sampling.transformed(logits, warm, context)
    q = sampling.normalised(logits)  # [B, W, V]
    if with_replacement:
        keys = random.siblings(jnp.repeat(keys[:, None], most, 1), jnp.broadcast_to(jnp.arange(most), (len(q), most)))
        noisy = jnp.log(q)[:, :, None] + random.gumbel(keys, vocab)[:, None]  # [B, W, M, V]
        drawn = jnp.argmax(jnp.where(greedy[..., None], logits[:, :, None], noisy), axis=-1)  # [B, W, M]
        given = jnp.broadcast_to(q[:, :, None], noisy.shape)
    else:
        noisy = jnp.log(q) + random.gumbel(keys[:, None], vocab)
        drawn = jax.lax.top_k(jnp.where(greedy, logits, noisy), most)[1]
        given = jax.vmap(multi.without_replacement, in_axes=1, out_axes=1)(q, drawn)
    certain = jnp.where(given > 0, jax.nn.one_hot(drawn, vocab), 0.0)
    given = jnp.where(greedy[..., None], certain, given)
    return drawn[:, parents, ranks].astype(jnp.int32), given[:, parents, ranks]


def levels_of(topology: Topology) -> list[Level]:
    """What is asked about, level by level, from the root down."""
    depths, inner = topology.depths, np.unique(topology.parents)
    levels: list[Level] = []
    for depth in range(topology.depth):
        nodes = inner[depths[inner] == depth]
        above = inner[(depths[inner] < depth) & (inner > 0)]
        before = levels[-1].nodes if levels else np.zeros(1, int)
        parents = np.searchsorted(before, np.array((0, *topology.parents))[nodes])
        sees = topology.ancestors[np.ix_(nodes, np.concatenate([above, nodes]))]
        way = np.array([np.flatnonzero(topology.ancestors[node])[1:] for node in nodes], int)
        born = np.isin((-1, *topology.parents), nodes)
        children = np.searchsorted(nodes, np.array((-1, *topology.parents))[born]), topology.ranks[born]
        levels.append(Level(depth, nodes, parents, len(above), sees, way, children))
    return levels
