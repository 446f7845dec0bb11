"""The one round of speculative decoding: propose, score, judge, commit (Leviathan et al. 2023, algorithm 1).

Every way to decode runs this round. ``generate`` repeats it on the device, ``stream`` calls it from Python, a cascade
runs it inside its proposal, and plain decoding is the round of a drafter that proposes nothing. Each of the four steps
can be called alone.

An example with three rows and K = 3. Capital letters are committed tokens.

    row  text before  draft    the target accepts  its own token   text after the round  committed
    0    A B          c d e    c, refuses d        x (correction)  A B c x               2
    1    F            g h i    g, h and i          y (bonus)       F g h i y             4
    2    J K L        nothing  nothing             z (plain)       J K L z               1

The target runs once, on a block of four tokens a row: the last committed token and the three drafted ones. In row 0
the target reads B, c, d, e and answers with p after each. The verifier compares the answer after B with c, and the
answer after c with d. The verifier refuses d, draws x in its place, and ignores the rest. The cache now holds entries
of d and e, which are no part of the text. Nothing is moved: the row's new length says that these entries are stale, and
the next round overwrites them.
"""

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode import history, rows, sampling
from specjax.decode.arrays import fitted, row_at, rows_at, span, token_probs
from specjax.decode.draft_shape import ChainShape
from specjax.decode.types import DecodeState, Draft, Judged, Outcome, RoundInfo, Scored, Verdict
from specjax.models import axes, tuning
from specjax.models import cache as kv
from specjax.models.model import Output
from specjax.verify import pieces as chain

if TYPE_CHECKING:
    from specjax.decode.decoder import Decoder


def round(decoder: "Decoder", state: DecodeState) -> tuple[DecodeState, RoundInfo]:
    """One round: each active row commits between 1 and K + 1 tokens. A pure function, not compiled by itself."""
    draft, state = propose(decoder, state)
    scored = score(decoder, state, draft)
    judged = judge(decoder, state, scored)
    return commit(decoder, state, scored, judged)


def propose(decoder: "Decoder", state: DecodeState) -> tuple[Draft, DecodeState]:
    """The drafter's proposal, cut to what can be committed, and the state with the drafter's new own state."""
    keys = decoder.verifier.draft_keys(state.request.key, state.lengths)
    draft, own, cache = decoder.drafter.propose(
        decoder.target, state.drafter, state, keys, decoder.num_speculative_tokens
    )
    return committable(draft, state), state._replace(drafter=own, cache=cache)


def committable(draft: Draft, state: DecodeState) -> Draft:
    """Drops tokens past the row's limit, tokens of idle rows, and all tokens below a stop token or a dropped one."""
    room = (state.request.limit - state.lengths - 1)[:, None]  # one token of every round is the target's own
    depths = draft.shape.depths(draft.tokens.shape[1])
    valid = draft.valid & state.active[:, None] & (depths[:, 1:] <= room)
    ends = is_stop(draft.tokens, state.request.stop_ids) | ~valid
    return draft._replace(valid=valid & ~draft.shape.below(jnp.pad(ends, ((0, 0), (1, 0)))))


def score(decoder: "Decoder", state: DecodeState, draft: Draft) -> Scored:
    """The target's answers to the draft, from one call, and the distributions p that follow from the row's sampling."""
    out = run_target(decoder, state, draft)
    path = draft.shape.path(draft.tokens, decoder.num_speculative_tokens)
    p = sampling.distribution(out.logits, state.request.sampling, state.context(path))  # [B, N+1, V]
    impossible = ~jnp.isfinite(p[..., 0])  # [B, N+1]; a position without a distribution is NaN throughout
    return Scored(draft._replace(valid=draft.valid & ~draft.shape.below(impossible)), out, p)


def run_target(decoder: "Decoder", state: DecodeState, draft: Draft) -> Output:
    """The target on the last committed token and the draft, at the narrowest compiled width that holds every draft.

    Returns:
      Logits f32[B, N+1, V] and hidden states of all N + 1 nodes; those past the width that ran are zeros.

    Raises:
      ValueError: while this is traced, if the plan's widths don't rise to N + 1. Otherwise a draft could be longer than
        every compiled width.
    """
    plan, full = decoder.plan, draft.tokens.shape[1] + 1
    if list(plan.widths) != sorted(set(plan.widths)) or list(plan.widths)[-1:] != [full]:
        raise ValueError(
            f"the drafter's widths must rise to its block of {full} tokens, the last committed and {full - 1} drafted, "
            f"got {plan.widths}"
        )
    last = row_at(state.tokens, state.lengths - 1)
    block = jnp.concatenate([last[:, None], draft.tokens], axis=1)  # [B, N+1]
    cache = kv.with_lengths(state.cache, state.lengths - 1)
    attention = draft.shape.attention(cache.lengths, cache.capacity)
    least = tuning.least_tokens(decoder.target, len(block))
    widths = tuple(sorted({max(width, least) for width in decoder.widths}))

    def at_width(width: int, cache: kv.KVCache) -> Output:
        positions, mask = jax.tree.map(lambda x: x[:, :width], attention)  # of a chain, None
        out = decoder.target(fitted(block, width), cache, positions, mask, taps=plan.taps)
        logits, hidden, taps = jax.tree.map(lambda x: fitted(x, full), (out.logits, out.hidden, out.taps))
        return Output(logits, hidden, out.cache, taps)

    if len(widths) == 1:
        return at_width(widths[0], cache)
    last_valid = jnp.max(jnp.where(draft.valid, 1 + span(full - 1), 0), axis=1, initial=0)  # i32[B]
    asked = 0 if draft.run_at_least is None else jnp.where(state.active, draft.run_at_least, 0)
    needed = 1 + jnp.max(jnp.maximum(last_valid, asked))
    branch = jnp.sum(needed > jnp.array(widths[:-1], jnp.int32), dtype=jnp.int32)
    return lax.switch(branch, [partial(at_width, width) for width in widths], cache)


def judge(decoder: "Decoder", state: DecodeState, scored: Scored) -> Judged:
    """The verifier's verdict. After it, a tree is treated as the chain of its accepted tokens."""
    verdict = decoder.verifier.verify(scored.p, scored.draft, state.request.key, state.lengths)
    return judged_as(decoder, state, scored, verdict)


def judged_as(decoder: "Decoder", state: DecodeState, scored: Scored, verdict: Verdict) -> Judged:
    """The draft after a given verdict."""
    draft, out, p = scored
    if isinstance(draft.shape, ChainShape):
        return Judged(verdict, draft, p, out)
    assert verdict.node is not None
    nodes, reached = draft.shape.line(verdict.node, draft.valid, decoder.num_speculative_tokens)  # [B, K]
    cache = kv.move(out.cache, state.lengths[:, None] - 1 + nodes, state.lengths)
    drafted = jnp.maximum(nodes - 1, 0)
    probs = None if draft.probs is None else rows_at(draft.probs, drafted)
    nodes = jnp.pad(nodes, ((0, 0), (1, 0)))  # [B, K+1]
    logits, hidden, taps = jax.tree.map(lambda x: rows_at(x, nodes), (out.logits, out.hidden, out.taps))
    line = Draft(rows_at(draft.tokens, drafted), reached, probs)
    return Judged(verdict, line, rows_at(p, nodes), Output(logits, hidden, cache, taps))


def commit(decoder: "Decoder", state: DecodeState, scored: Scored, judged: Judged) -> tuple[DecodeState, RoundInfo]:
    """Appends the accepted tokens and the target's own, up to the first stop token and the limit.

    The caches are rolled back by their lengths. The drafter learns the outcome.
    """
    state, info = append(decoder, state, judged)
    learned = outcome(scored, judged, info.accepted, info.drafted)
    state = state._replace(drafter=decoder.drafter.commit(decoder.target, state.drafter, state, learned))
    return rows.over_mesh(state, decoder.target.mesh), info


def outcome(scored: Scored, judged: Judged, accepted: jax.Array, drafted: jax.Array) -> Outcome:
    """What the drafter learns of a round that kept i32[B] ``accepted`` of i32[B] ``drafted`` tokens."""
    answers = jnp.argmax(scored.out.logits, axis=-1).astype(jnp.int32)
    return Outcome(accepted, drafted, judged.p, judged.out.hidden, judged.out.taps, scored.draft, answers)


def append(decoder: "Decoder", state: DecodeState, judged: Judged) -> tuple[DecodeState, RoundInfo]:
    """The state with the new tokens in it, and the round as an observer sees it."""
    draft, p, (count, token, _) = judged.draft, judged.p, judged.verdict
    size, (stop_ids, limit) = draft.tokens.shape[1], (state.request.stop_ids, state.request.limit)
    offset = span(size + 1)
    block = jnp.where(offset < count[:, None], jnp.pad(draft.tokens, ((0, 0), (0, 1))), token[:, None])  # [B, K+1]

    has_own = row_at(jnp.isfinite(p[..., 0]), count)  # bool[B] whether a token of the target's own follows the accepted
    new = count + has_own.astype(jnp.int32)
    stops = is_stop(block, stop_ids) & (offset < new[:, None])
    to_stop = jnp.min(jnp.where(stops, offset + 1, size + 2), axis=1)
    committed = jnp.where(state.active, jnp.minimum(jnp.minimum(new, to_stop), limit - state.lengths), 0)  # [B]
    # Accepted tokens alone never reach the limit, because a draft leaves room for one more token.
    failed = state.active & ~has_own & (committed < to_stop)
    lengths = state.lengths + committed

    seen = partial(history.log_probabilities, count=decoder.top_logprobs)
    logprobs, top = axes.by_part(seen, decoder.target.mesh, len(block))(judged.out.logits, block)
    info = RoundInfo(
        starts=state.lengths,
        tokens=block,
        committed=committed,
        accepted=jnp.minimum(count, committed),
        draft=draft.tokens,
        drafted=jnp.where(committed > 0, jnp.sum(draft.valid, axis=1, dtype=jnp.int32), 0),
        p=token_probs(p[:, :size], draft.tokens),
        q=chain.draft_token_probs(draft),
        entropy=chain.draft_entropy(draft, p.shape[-1]),
        logprobs=logprobs,
        active=state.active & ~failed & (committed < to_stop) & (lengths < limit),
        failed=state.failed | failed,
        top=top,
    )
    after = state._replace(
        tokens=history.put(state.tokens, block, state.lengths),
        lengths=lengths,
        active=info.active,
        failed=info.failed,
        cache=kv.with_lengths(judged.out.cache, lengths - 1),
        history=None if state.history is None else history.extended(state.history, info, committed > 0),
    )
    return after, info


def is_stop(tokens: jax.Array, stop_ids: jax.Array) -> jax.Array:
    """Which of tokens i32[B, T] end their row, by stop_ids i32[B, E]. -> bool[B, T]."""
    return jnp.any(tokens[:, :, None] == stop_ids[:, None, :], axis=-1)
