"""The one round of speculative decoding, and the loop over it.

A round proposes, scores, judges, commits. ``generate`` runs rounds under ``lax.while_loop`` without touching the
host, ``stream`` calls the same round from Python; plain decoding is the round of a drafter that proposes nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from specjax import sampling, tree
from specjax.models import cache as kv
from specjax.models.llama import Output
from specjax.models.lm import LM
from specjax.types import DecodeState, Draft, Drafter, Outcome, Request, RoundInfo, Verdict, Verifier
from specjax.verify import chain


def round(
    target: LM, drafter: Drafter, verifier: Verifier, num_speculative_tokens: int, state: DecodeState
) -> tuple[DecodeState, RoundInfo]:
    """One round: every active row commits between 1 and K + 1 tokens. Pure; wrap it in ``jax.jit`` as you like.

    Leviathan et al. 2023, algorithm 1, for each row on its own.
    """
    state, info, *_ = advance(target, drafter, verifier, num_speculative_tokens, state)
    return state, info


def advance(
    target: LM, drafter: Drafter, verifier: Verifier, num_speculative_tokens: int, state: DecodeState
) -> tuple[DecodeState, RoundInfo, jax.Array, jax.Array]:
    """:func:`round`, and at every position of its block the target's probabilities f32[B, K+1, V] and
    ``sampling.unsharpened`` logits f32[B, K+1, V].

    From the verdict on a tree is the chain of what was accepted.
    """
    keys = verifier.draft_keys(state.key, state.lengths)
    draft, state = drafter.propose(target, state, keys, num_speculative_tokens)
    shape = tree.of(draft)
    draft = usable(draft, shape, state)
    out = score(target, state, draft, shape, drafter.widths(num_speculative_tokens), drafter.taps(target))
    path = shape.path(draft.tokens, num_speculative_tokens)
    context = sampling.Context(state.tokens, state.lengths, state.prompt_lengths, path)
    p = sampling.distribution(out.logits, state.sampling, context)  # [B, N+1, V]
    finite = jnp.isfinite(p[..., 0])  # [B, N+1]; a position without a distribution is NaN throughout
    draft = draft._replace(valid=draft.valid & ~shape.below(~finite))
    verdict = verifier.verify(p, draft, state.key, state.lengths)
    judged, answers = draft, jnp.argmax(out.logits, axis=-1).astype(jnp.int32)
    draft, p, out = along(shape, verdict, draft, p, out, state, num_speculative_tokens)
    failed = state.active & ~chain.row_at(jnp.isfinite(p[..., 0]), verdict.count)
    state, info = commit(state._replace(cache=out.cache), draft, p, out.logits, verdict, failed)
    outcome = Outcome(info.accepted, info.drafted, p, out.logits, out.hidden, out.taps, judged, answers)
    chained = context._replace(path=sampling.chain_path(draft.tokens))
    unsharpened = sampling.unsharpened(out.logits, state.sampling, chained)
    return drafter.commit(target, state, outcome), info, p, unsharpened


def usable(draft: Draft, shape: tree.Chain | tree.Tree, state: DecodeState) -> Draft:
    """Drops what can't be committed: past the row's limit, past a drafted stop token, in idle rows, and all below."""
    room = (state.limit - state.lengths - 1)[:, None]  # one token of every round is the target's own
    stops = is_stop(draft.tokens, state.stop_ids)
    valid = draft.valid & state.active[:, None] & (shape.depth[:, 1:] <= room)
    above = ((0, 0), (1, 0))  # the root is neither
    return draft._replace(valid=valid & ~shape.below(jnp.pad(stops | ~valid, above)))


def score(
    target: LM,
    state: DecodeState,
    draft: Draft,
    shape: tree.Chain | tree.Tree,
    widths: tuple[int, ...],
    taps: tuple[int, ...],
) -> Output:
    """The target on [last committed token, draft]: one call, at the narrowest compiled width that holds every draft.

    Returns logits f32[B, N+1, V] and hidden states for all N + 1 positions; those past the width run are zeros.

    Raises:
      ValueError: while it is traced, unless the widths rise to N + 1: where none holds a draft it would be cut, and
        judged by zeros, and by the last one capacities are reckoned.
    """
    full = draft.tokens.shape[1] + 1
    if list(widths) != sorted(set(widths)) or list(widths)[-1:] != [full]:
        raise ValueError(
            f"the drafter's widths must rise to its block of {full} tokens, the last committed and {full - 1} drafted, "
            f"got {widths}"
        )
    rows = jnp.arange(state.lengths.shape[0])
    last = state.tokens[rows, state.lengths - 1]
    block = jnp.concatenate([last[:, None], draft.tokens], axis=1)  # [B, N+1]
    cache = kv.with_lengths(state.cache, state.lengths - 1)
    attention = shape.attention(cache.lengths, cache.capacity)
    widths = tuple(sorted({max(width, narrowest(target, len(block))) for width in widths}))

    def at_width(width: int, cache: kv.KVCache) -> Output:
        positions, mask = jax.tree.map(lambda x: x[:, :width], attention)
        out = target(fitted(block, width), cache, positions, mask, taps=taps)
        logits, hidden, taken = jax.tree.map(lambda x: fitted(x, full), (out.logits, out.hidden, out.taps))
        return Output(logits, hidden, out.cache, taken)

    if len(widths) == 1:
        return at_width(widths[0], cache)
    counts = jnp.max(draft.valid * jnp.arange(1, full), axis=1)  # i32[B] the last node that does
    least = 0 if draft.least is None else draft.least * state.active
    needed = 1 + jnp.max(jnp.maximum(counts, least))
    branch = jnp.sum(needed > jnp.array(widths[:-1]))
    return lax.switch(branch, [partial(at_width, width) for width in widths], cache)


def narrowest(target: LM, batch: int) -> int:
    """Tokens a row that a call feeds at least.

    Where matrices are large, XLA's products on a GPU take longer for a single row than for two. What the second token
    writes is past the row's length, where capacity leaves room for it.
    """
    large = target.config.hidden_size >= 2048  # measured: 2048 to 4096 gain, 576 and 960 lose (docs/performance.md)
    return 2 if large and batch == 1 and not target.in_parts and jax.default_backend() == "gpu" else 1


def fitted(x: jax.Array, width: int) -> jax.Array:
    """x[B, T, ...] with zeros after it, or cut. -> [B, width, ...]."""
    missing = max(0, width - x.shape[1])
    return jnp.pad(x, ((0, 0), (0, missing), *((0, 0) for _ in x.shape[2:])))[:, :width]


def along(
    shape: tree.Chain | tree.Tree,
    verdict: Verdict,
    draft: Draft,
    p: jax.Array,
    out: Output,
    state: DecodeState,
    num_speculative_tokens: int,
) -> tuple[Draft, jax.Array, Output]:
    """A tree's round as that of the chain that was accepted: a draft of K tokens, and all else at its K + 1 positions.

    The target's cache then holds the accepted tokens' entries in order. A chain stays as it is.
    """
    if isinstance(shape, tree.Chain):
        return draft, p, out
    assert verdict.node is not None
    nodes, reached = shape.line(verdict.node, draft.valid, num_speculative_tokens)  # [B, K]
    cache = kv.move(out.cache, state.lengths[:, None] - 1 + nodes, state.lengths)
    drafted = jnp.maximum(nodes - 1, 0)
    chosen = Draft(take(draft.tokens, drafted), reached, None if draft.probs is None else take(draft.probs, drafted))
    at = jnp.pad(nodes, ((0, 0), (1, 0)))  # [B, K+1]
    logits, hidden, taps = jax.tree.map(lambda x: take(x, at), (out.logits, out.hidden, out.taps))
    return chosen, take(p, at), Output(logits, hidden, cache, taps)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[b, index[b, t]] of x[B, N, ...], i32[B, T]. -> [B, T, ...]."""
    return jax.vmap(lambda row, at: row[at])(x, index)


def commit(
    state: DecodeState, draft: Draft, p: jax.Array, logits: jax.Array, verdict: Verdict, failed: jax.Array
) -> tuple[DecodeState, RoundInfo]:
    """Appends accepted tokens and the target's own, up to the first stop token and the limit; rolls back by lengths."""
    size = draft.tokens.shape[1]
    offset = jnp.arange(size + 1)
    own = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    block = jnp.where(offset < verdict.count[:, None], own, verdict.token[:, None])  # [B, K+1]

    running = state.active & ~failed
    stops = is_stop(block, state.stop_ids) & (offset <= verdict.count[:, None])
    to_stop = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, size + 2)
    room = state.limit - state.lengths
    committed = jnp.minimum(jnp.minimum(verdict.count + 1, to_stop), room) * running  # [B]
    accepted = jnp.minimum(verdict.count, committed)
    drafted = jnp.sum(draft.valid, axis=1) * running
    lengths = state.lengths + committed
    active = running & (committed < to_stop) & (lengths < state.limit)

    rows = jnp.arange(lengths.shape[0])
    round_index = jnp.where(running, state.rounds, state.tokens.shape[1])  # idle rows write nowhere
    logprobs = chain.token_probs(jax.nn.log_softmax(logits), block)  # [B, K+1]
    new = state._replace(
        tokens=_append(state.tokens, block, state.lengths),
        lengths=lengths,
        active=active,
        failed=state.failed | failed,
        cache=kv.with_lengths(state.cache, lengths - 1),
        rounds=state.rounds + running,
        drafted=state.drafted.at[rows, round_index].set(drafted, mode="drop"),
        accepted=state.accepted.at[rows, round_index].set(accepted, mode="drop"),
        logprobs=None if state.logprobs is None else _append(state.logprobs, logprobs, state.lengths),
    )
    info = RoundInfo(
        starts=state.lengths,
        tokens=block,
        committed=committed,
        accepted=accepted,
        draft=draft.tokens,
        drafted=drafted,
        p=chain.token_probs(p[:, :size], draft.tokens),
        q=chain.draft_token_probs(draft),
        entropy=chain.draft_entropy(draft, p.shape[-1]),
        logprobs=logprobs,
        active=active,
        failed=new.failed,
    )
    return new, info


def is_stop(tokens: jax.Array, stop_ids: jax.Array) -> jax.Array:
    """Which of tokens i32[B, T] end their row, by stop_ids i32[B, E]. -> bool[B, T]."""
    return jnp.any(tokens[:, :, None] == stop_ids[:, None, :], axis=-1)


def _append(buffer: jax.Array, block: jax.Array, lengths: jax.Array) -> jax.Array:
    # Capacity leaves room for a whole block past the limit, so the slice is never clamped; what lies past the new
    # length is overwritten by the next round.
    return jax.vmap(lambda row, new, at: lax.dynamic_update_slice(row, new, (at,)))(buffer, block, lengths)


def start(
    target: LM, drafter: Drafter, request: Request, num_speculative_tokens: int, chunk: int, logprobs: bool
) -> DecodeState:
    """The state before the first round: caches allocated, all but the last prompt token fed, ``chunk`` at a time."""
    batch, capacity = request.tokens.shape
    wanted = jnp.max(request.prompt_lengths) - 1

    def feed(i, carry):
        cache, own = carry
        tokens = lax.dynamic_slice_in_dim(request.tokens, i * chunk, chunk, axis=1)
        starts = jnp.full_like(request.prompt_lengths, i * chunk)
        out = target(tokens, kv.with_lengths(cache, starts), with_logits=False, taps=drafter.taps(target))
        return out.cache, drafter.follow(target, own, request, starts, out)

    empty = target.alloc_cache(batch, capacity), drafter.init(target, batch, capacity, num_speculative_tokens)
    cache, own = lax.fori_loop(0, (wanted + chunk - 1) // chunk, feed, empty)
    return DecodeState(
        **request._asdict(),
        lengths=request.prompt_lengths,
        active=request.prompt_lengths < request.limit,
        failed=jnp.zeros(batch, bool),
        cache=kv.with_lengths(cache, request.prompt_lengths - 1),
        drafter=own,
        rounds=jnp.zeros(batch, jnp.int32),
        drafted=jnp.zeros((batch, capacity), jnp.int32),
        accepted=jnp.zeros((batch, capacity), jnp.int32),
        logprobs=jnp.zeros((batch, capacity), jnp.float32) if logprobs else None,
    )


def run(
    target: LM, drafter: Drafter, verifier: Verifier, num_speculative_tokens: int, state: DecodeState
) -> DecodeState:
    """Rounds until no row is active, all on the device."""

    def body(state: DecodeState) -> DecodeState:
        return round(target, drafter, verifier, num_speculative_tokens, state)[0]

    return lax.while_loop(lambda state: jnp.any(state.active), body, state)


# The compiled forms. The state is donated, so its caches are updated in place; weights never are.
start_jit = jax.jit(start, static_argnames=("num_speculative_tokens", "chunk", "logprobs"))
round_jit = jax.jit(round, static_argnames=("verifier", "num_speculative_tokens"), donate_argnames="state")
run_jit = jax.jit(run, static_argnames=("verifier", "num_speculative_tokens"), donate_argnames="state")
