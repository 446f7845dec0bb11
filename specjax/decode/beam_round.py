"""The round of beam search with speculation (Leviathan et al. 2023, appendix A.4): propose, score, judge, commit.

The drafter runs a beam search of its own from the target's W beams, u >= W beams wide and K steps deep. One call of
the target reads the last tokens of the W beams and the u tokens of each drafted level. Then the target's own search
walks over these answers. A step needs the logits after its W beams. If all of them are among the drafted tokens, the
walk goes on. It also goes on if the beams that were not drafted are so unlikely that their children could not have been
chosen. So a round takes 1 to K + 1 steps, each exactly the step of plain beam search. Plain beam search is the round of
a drafter that proposes nothing.

All beams of a prompt share one row of the cache. A step adds W entries, and a mask says which entries are of which
beam:

    slots     prompt | step 1      | step 2      | block: last tokens, then K levels of u
    W = 2     a b c  | d  e        | f  g        | h  i   j k l   m n o
    beam 1    x x x  | x           |    x        | its last token is h
    beam 2    x x x  |    x        | x           | its last token is i

So a beam that is continued twice, or not at all, moves no cache. After the walk the entries of its beams are moved
together: slots then lie as if each step had been a plain one.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode import history as histories
from specjax.decode.arrays import rows_at, span, where_rows
from specjax.decode.beams import Beams, Children, Finished, Rules, advance, grown, last_tokens, placed
from specjax.decode.decoder import Decoder
from specjax.decode.sampling import SamplingParams
from specjax.decode.types import DecodeState, Drafter, History, Request
from specjax.models import cache as kv
from specjax.models.cache import KVCache
from specjax.models.model import Model, Output


class Levels(NamedTuple):
    """What a drafter proposes: u tokens for each of K steps, K = 0 for none."""

    # i32[B, K, u] The tokens.
    tokens: jax.Array
    # i32[B, K, u] Which text each token continues: at the first level a beam, and else a token of the level before.
    parents: jax.Array


class BeamDrafter(Drafter, Protocol):
    """A drafter that can also draft for beams. Its own state is that of :class:`specjax.decode.types.Drafter`."""

    def propose_beams(
        self, target: Model, own: Any, state: "BeamState", num_speculative_tokens: int, width: int
    ) -> tuple[Levels, Any]:
        """What the target's beams will be in the next steps, as well as the drafter knows.

        Args:
          target: the target.
          own: the own state.
          state: the round's. ``state.cache.lengths`` is the number of slots in use.
          num_speculative_tokens: K.
          width: u.

        Returns:
          The drafted levels and the new own state.
        """
        ...

    def commit_beams(self, own: Any, slots: jax.Array, starts: jax.Array, lengths: jax.Array) -> Any:
        """Keeps the entries of the accepted tokens, in a cache that was filled as the target's.

        Args:
          own: the own state.
          slots: i32[B, M], the slots whose entries are moved to the slots from ``starts`` on.
          starts: i32[B], the number of slots that were in use before the round.
          lengths: i32[B], the number of slots in use after the round.

        Returns:
          The new own state.
        """
        ...


class BeamState(NamedTuple):
    """All that one round of beam search hands to the next. Axis 0 of every array is the prompt."""

    # What is asked for.
    request: Request
    rules: Rules
    # The unfinished texts, and their length i32[B], the same for all beams of a prompt.
    beams: Beams
    lengths: jax.Array
    # The texts that have ended.
    finished: Finished
    # bool[B] Whether the search goes on.
    active: jax.Array
    # The target's cache. Its lengths say how many slots are in use: W a step.
    cache: KVCache
    # The drafter's own state.
    drafter: Any
    # The steps that each round drafted and accepted.
    history: History


class Nodes(NamedTuple):
    """The M = W + K * u tokens that one call of the target reads: the last tokens of the beams, then each level."""

    # i32[B, M]
    tokens: jax.Array
    # i32[B, M] The node that each drafted token continues; 0 for the last tokens.
    parents: jax.Array
    # i32[B, M] The positions of the tokens in their texts.
    positions: jax.Array
    # bool[B, M, S] The slots that each node sees.
    sees: jax.Array


class Walk(NamedTuple):
    """How far the target's search has come in one round."""

    beams: Beams
    lengths: jax.Array
    finished: Finished
    active: jax.Array
    # bool[B] Whether the walk goes on.
    going: jax.Array
    # i32[B, W] The node of each beam's last token.
    at: jax.Array
    # bool[B, W] Whether the beam was not drafted: there is no such node, and no answer after it.
    lost: jax.Array
    # i32[B, K+1, W] The nodes of the beams of each step.
    kept: jax.Array
    # i32[B] The number of steps.
    steps: jax.Array


@partial(
    jax.tree_util.register_dataclass, data_fields=["decoder"], meta_fields=["num_beams", "num_draft_beams"]
)
@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """What searches, as a pytree: weights are its leaves.

    Args:
      decoder: target, drafter and K. The drafter is a :class:`BeamDrafter`. The verifier is not used.
      num_beams: W; static.
      num_draft_beams: u, at least W; static.
    """

    decoder: Decoder
    num_beams: int
    num_draft_beams: int

    @property
    def drafter(self) -> BeamDrafter:
        """The decoder's drafter."""
        return cast(BeamDrafter, self.decoder.drafter)

    def start(self, state: DecodeState, rules: Rules) -> BeamState:
        """The search before its first round, from the state after the prompts; compiled."""
        return start_jit(self, state, rules)

    def run(self, state: BeamState) -> BeamState:
        """Rounds until every search has ended, all on the device; compiled. The state is donated."""
        return run_jit(self, state)


def start(search: BeamSearch, state: DecodeState, rules: Rules) -> BeamState:
    """The search before its first round: the prompt is the only beam."""
    width, (batch, capacity) = search.num_beams, state.tokens.shape
    tokens = jnp.broadcast_to(state.tokens[:, None], (batch, width, capacity))
    alone = jnp.broadcast_to(jnp.where(span(width) == 0, 0.0, -jnp.inf), (batch, width))
    sees = jnp.broadcast_to((span(capacity) < state.cache.lengths[:, None])[:, None], tokens.shape)
    none = jnp.full((batch, width), -jnp.inf)
    finished = Finished(tokens, jnp.broadcast_to(state.lengths[:, None], none.shape), none)
    return BeamState(
        state.request, rules, Beams(tokens, alone, sees), state.lengths, finished, state.active, state.cache,
        state.drafter, histories.history_of(state),
    )  # fmt: skip


def round(search: BeamSearch, state: BeamState) -> BeamState:
    """One round: each active search takes between 1 and K + 1 steps."""
    decoder = search.decoder
    levels, own = search.drafter.propose_beams(
        decoder.target, state.drafter, state, decoder.num_speculative_tokens, search.num_draft_beams
    )
    nodes = nodes_of(state, levels)
    out = decoder.target(nodes.tokens, state.cache, nodes.positions, nodes.sees)
    return commit(search, state._replace(drafter=own), out, judge(search, state, nodes, out))


def nodes_of(state: BeamState, levels: Levels) -> Nodes:
    """The last tokens of the beams and the drafted levels as one block."""
    (_, width), (batch, depth, wide) = state.beams.scores.shape, levels.tokens.shape
    above, starts = placed(state.beams.sees, state.cache.lengths), state.cache.lengths + width
    sees, parents, first = [above], [jnp.zeros((batch, width), jnp.int32)], 0
    for level in range(depth):
        above = placed(rows_at(above, levels.parents[:, level]), starts + level * wide)
        sees.append(above)
        parents.append(first + levels.parents[:, level])
        first = width + level * wide
    tokens = jnp.concatenate([last_tokens(state.beams, state.lengths), levels.tokens.reshape(batch, -1)], axis=1)
    depths = jnp.array([0] * width + [level + 1 for level in range(depth) for _ in range(wide)], jnp.int32)
    positions = state.lengths[:, None] - 1 + depths
    return Nodes(tokens, jnp.concatenate(parents, axis=1), positions, jnp.concatenate(sees, axis=1))


def certain(chosen: Children, scores: jax.Array, lost: jax.Array, sampling: SamplingParams) -> jax.Array:
    """Whether the chosen candidates would be the same if the children of lost beams had competed. -> bool[B].

    A child's score is at most that of its beam. If every chosen candidate has a higher score than every lost beam, no
    child of a lost beam would be among the best. Biases and some penalties can make a score rise, so with them there is
    no such bound.

    Args:
      chosen: the W candidates, chosen among the children of the other beams.
      scores: f32[B, W], the scores of the beams.
      lost: bool[B, W], the beams after which the logits are not known.
      sampling: how tokens are scored.
    """
    highest = jnp.max(jnp.where(lost, scores, -jnp.inf), axis=1)
    rises = any(x is not None for x in (sampling.logit_bias, sampling.presence_penalty, sampling.frequency_penalty))
    none_lost = jnp.isneginf(highest)  # beams that are not there have no children
    return none_lost | (chosen.scores[:, -1] > (jnp.inf if rises else highest))


def judge(search: BeamSearch, state: BeamState, nodes: Nodes, out: Output) -> Walk:
    """The target's search over the answers to a block, as far as the answers decide it."""
    width, wide, depth = search.num_beams, search.num_draft_beams, search.decoder.num_speculative_tokens
    roots = jnp.broadcast_to(span(width), state.beams.scores.shape)
    kept = jnp.broadcast_to(roots[:, None], (len(roots), depth + 1, width))
    walk = Walk(
        state.beams, state.lengths, state.finished, state.active, state.active, roots, jnp.zeros(roots.shape, bool),
        kept, jnp.zeros_like(state.lengths),
    )  # fmt: skip

    def step(carry: tuple[jax.Array, Walk]) -> tuple[jax.Array, Walk]:
        i, old = carry
        beams = Beams(
            tokens=old.beams.tokens,
            scores=jnp.where(old.lost, -jnp.inf, old.beams.scores),
            sees=placed(old.beams.sees, state.cache.lengths + i * width),
        )
        logits = rows_at(out.logits, old.at)  # [B, W, V]
        chosen, finished, active = advance(
            beams, old.finished, old.lengths, logits, state.request, state.cache.first, state.rules
        )
        drafted = width + i * wide + jnp.arange(wide, dtype=jnp.int32)  # the nodes of the next level
        tokens, parents = (jnp.take(x, drafted, axis=1, mode="clip") for x in (nodes.tokens, nodes.parents))
        same = (tokens[:, None] == chosen.tokens[..., None]) & (
            parents[:, None] == rows_at(old.at, chosen.parents)[..., None]
        )  # [B, W, u]
        new = Walk(
            beams=grown(beams, old.lengths, chosen),
            lengths=old.lengths + 1,
            finished=finished,
            active=active,
            going=active & (i < depth),
            at=width + i * wide + jnp.argmax(same, axis=2).astype(jnp.int32),
            lost=~jnp.any(same, axis=2),
            kept=old.kept.at[:, i].set(old.at),
            steps=old.steps + 1,
        )
        taken = old.going & certain(chosen, old.beams.scores, old.lost, state.request.sampling)
        return i + 1, where_rows(taken, new, old._replace(going=jnp.zeros_like(taken)))

    return lax.while_loop(lambda carry: jnp.any(carry[1].going), step, (jnp.int32(0), walk))[1]


def commit(search: BeamSearch, state: BeamState, out: Output, walk: Walk) -> BeamState:
    """The state after the steps of a walk. The entries of the beams' tokens are moved together."""
    starts, width = state.cache.lengths, search.num_beams
    slots = starts[:, None] + walk.kept.reshape(len(starts), -1)
    lengths = starts + width * walk.steps
    room = jnp.maximum(state.request.limit - state.lengths - 1, 0)
    drafted = jnp.minimum(search.decoder.num_speculative_tokens, room)
    cache = out.cache if walk.kept.shape[1] == 1 else kv.move(out.cache, slots, starts)
    return state._replace(
        beams=walk.beams,
        lengths=walk.lengths,
        finished=walk.finished,
        active=walk.active,
        cache=kv.with_lengths(cache, lengths),
        drafter=search.drafter.commit_beams(state.drafter, slots, starts, lengths),
        history=histories.counted(state.history, drafted, jnp.maximum(walk.steps - 1, 0), state.active),
    )


def run(search: BeamSearch, state: BeamState) -> BeamState:
    """Rounds until every search has ended."""
    return lax.while_loop(lambda state: jnp.any(state.active), lambda state: round(search, state), state)


start_jit = jax.jit(start)
run_jit = jax.jit(run, donate_argnames="state")
