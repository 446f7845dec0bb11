"""The conformance checks: assertions of the laws that every drafter and verifier must satisfy.

All checks run the batch of a :class:`Trial`, which holds rows of several sampling settings and prompts. Calls that
differ only in weights, seeds, limits and settings then share one compiled program for each drafter and verifier.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode import draft_shape, sampling
from specjax.decode import round as rounds_of
from specjax.decode.arrays import span
from specjax.decode.decoder import Decoder
from specjax.decode.history import history_of
from specjax.decode.types import DecodeState, Draft, Drafter, Verifier
from specjax.drafters import DraftModel, NoDraft, PromptLookup, TreeModel
from specjax.generation.generate import prepare
from specjax.models.lm import LM
from specjax.testing.laws import chi_square, count_sequences, joint_law
from specjax.testing.tiny_models import noisy_twin, tiny_lm
from specjax.testing.traces import count_traces
from specjax.testing.trial import PROMPTS, SETTINGS, Trial
from specjax.testing.verdicts import check_verdicts, probs_of
from specjax.verify import VERIFIERS

REJECT_BELOW = 1e-4  # p-values below this fail a test of a law
# The share of rows or tokens that rounding may change. The rounding of a matrix product may depend on the product's
# shape and on a row's place in it. About one draw in a million then lands on the other side of a boundary. Real faults
# change whole percents.
ROUNDING_FLIPS = 1e-3


def check_law(trial: Trial, early_stop: int | None = None) -> None:
    """Checks that under every setting the first tokens follow the exact joint law of plain sampling.

    Args:
      trial: the batch to run.
      early_stop: a stop token that ``min_new_tokens`` forbids everywhere but at the last of these tokens. None: no
        stop token.
    """
    # No row generates more than is compared, or than it must.
    limits = [max(trial.length, s.get("min_new_tokens", 0)) for s in SETTINGS.values() for _ in range(trial.rows)]
    changes: dict[str, Any] = {}
    if early_stop is not None:
        changes = {"eos_token_id": early_stop, "min_new_tokens": trial.length - 1}
    drawn = []
    for start in range(0, trial.draws, trial.rows):
        seeds = range(start * len(SETTINGS), start * len(SETTINGS) + trial.batch)
        rows = trial.sequences(trial.run(seed=list(seeds), max_new_tokens=limits, **changes))
        # Settings that forbid tokens may forbid all of them at a later token, and then the row ends.
        assert min(map(len, rows)) >= trial.length, f"{trial}: a row was left without a distribution"
        drawn.append(np.stack([row[: trial.length] for row in rows]).reshape(len(SETTINGS), trial.rows, -1))
    new = np.concatenate(drawn, axis=1)  # [settings, draws, length]
    for i, (name, setting) in enumerate(SETTINGS.items()):
        options = {**trial.neutral, **setting, **changes}
        law = joint_law(trial.target, PROMPTS[i % len(PROMPTS)], trial.length, **options)
        p_value = chi_square(count_sequences(new[i], trial.target.config.vocab_size), law)
        assert p_value > REJECT_BELOW, f"{trial}: not plain sampling's law under {name!r} (p = {p_value:.1e})"


def check_rows_alone(trial: Trial) -> None:
    """Checks that a row's tokens and history depend neither on its place in the batch nor on the other rows."""
    before = trial.run()
    order = np.random.default_rng(0).permutation(len(before.lengths))
    after = trial.run(order)
    for name in ("tokens", "lengths", "rounds", "drafted", "accepted"):
        a, b = _field(before, name)[order], _field(after, name)
        if name == "tokens":  # past its length a row holds leftovers of rounds
            a, b = (np.where(np.arange(x.shape[1]) < before.lengths[order, None], x, 0) for x in (a, b))
        differing = np.flatnonzero((a != b).reshape(len(order), -1).any(axis=1))
        assert len(differing) <= ROUNDING_FLIPS * len(order), (
            f"{trial}: {name} of {len(differing)} rows changed with their place"
        )


def _field(state: DecodeState, name: str) -> np.ndarray:
    """A field of the state or of its history."""
    return getattr(state if hasattr(state, name) else state.history, name)


def check_same_as_plain(trial: Trial, greedy: bool = True) -> set[int]:
    """Checks that the output equals plain decoding's token for token, for every limit and every stop token.

    Limits and stop tokens fall on every place in a block.

    Args:
      trial: the batch to run.
      greedy: whether to decode at temperature 0. False: at the temperature of each setting; only the verifier
        ``coupled`` promises equal tokens there.

    Returns:
      The places in a block, from 0 to K, at which stop tokens were met. With them a test can check that this check
      covers every place.
    """
    changes: dict[str, Any] = {"temperature": 0.0} if greedy else {}
    plain = dataclasses.replace(trial, drafter=NoDraft(), verifier="rejection")
    longest = plain.sequences(plain.run(**changes))
    limits = [i % (trial.new_tokens + 1) for i in range(len(longest))]
    places: set[int] = set()
    waits = [setting.get("min_new_tokens", 0) for setting in SETTINGS.values() for _ in range(trial.rows)]
    waiting = np.flatnonzero(waits)  # the rows whose text is not just cut at a stop token: the token may be forbidden
    for stop in [None, *range(trial.target.config.vocab_size)]:
        if stop is not None:
            changes["eos_token_id"] = stop
        stopped = dict(zip(waiting, plain.sequences(plain.run(waiting, **changes)), strict=True))
        least = [min(pair) for pair in zip(waits, limits, strict=True)]
        state = trial.run(**changes, max_new_tokens=limits, min_new_tokens=least)
        for i, got in enumerate(trial.sequences(state)):
            want = stopped[i][: limits[i]] if waits[i] else _cut(longest[i][: limits[i]], stop)
            assert stop not in want[: waits[i]], f"plain decoding: row {i} stops before it has {waits[i]} tokens"
            assert np.array_equal(got, want), (
                f"{trial}: row {i} is {got.tolist()}, but plain decoding gives {want.tolist()} "
                f"(limit {limits[i]}, stop token {stop})"
            )
            if stop is not None and len(got) and got[-1] == stop:
                history = history_of(state)
                places.add(int(len(got) - 1 - np.sum(history.accepted[i, : history.rounds[i] - 1] + 1)))
    return places


def _cut(tokens: np.ndarray, stop: int | None) -> np.ndarray:
    """The tokens up to the first stop token, which is included."""
    places = np.flatnonzero(tokens == (sampling.NO_TOKEN if stop is None else stop))
    return tokens[: places[0] + 1] if len(places) else tokens


def check_accepts_all(trial: Trial) -> None:
    """Checks that every drafted token is accepted. Use this for a drafter whose q equals the target's p."""
    history = history_of(trial.run())
    assert history.drafted.sum() > 0, f"{trial}: nothing was drafted"
    refused = int(history.drafted.sum() - history.accepted.sum())
    assert refused <= ROUNDING_FLIPS * history.drafted.sum(), f"{trial}: {refused} tokens refused, though p = q"


def check_acceptance_rate(trial: Trial, alpha: float) -> None:
    """Checks the acceptance rate under the setting "plain": it must be alpha, to 4 standard errors.

    Args:
      trial: the batch to run.
      alpha: the expected share of judged tokens that are accepted.
    """
    history = history_of(trial.run())
    drafted, accepted = (x[: trial.rows].ravel() for x in (history.drafted, history.accepted))
    reached = accepted.sum() + np.sum(accepted < drafted)
    measured, error = accepted.sum() / reached, np.sqrt(alpha * (1 - alpha) / reached)
    assert abs(measured - alpha) <= 4 * error, f"{trial}: acceptance {measured:.4f}, sum of min(p, q) is {alpha:.4f}"


def check_no_retrace(trial: Trial) -> None:
    """Checks that other seeds, limits, temperatures, prompts and rows of the same shapes compile nothing."""
    trial.run()
    order = np.arange(trial.batch)[::-1]
    with count_traces() as seen:
        trial.run(order, seed=7, temperature=0.5, top_p=0.7, max_new_tokens=trial.new_tokens)
    assert seen.compiled == 0, f"{trial}: {seen.compiled} programs compiled for shapes that had already run"


def check_path_independence(trial: Trial, rounds: int = 6, tolerance: float = 1e-4) -> None:
    """Checks that after every round the next proposal equals the proposal of a fresh ``init`` on the same prefix.

    This check finds stale draft caches. A stale draft cache costs only speed, so no test of laws can find one.

    Args:
      trial: the drafter, the target, the verifier and K. The batch has one row for each prompt.
      rounds: the number of rounds.
      tolerance: the largest allowed difference between probabilities. They differ by rounding, because the two
        drafters read the same prefix in different blocks.
    """
    job = prepare(
        trial.target, PROMPTS, drafter=trial.drafter, verifier=trial.verifier, temperature=1.0, ignore_eos=True,
        num_speculative_tokens=trial.num_speculative_tokens, lossy=True,
        max_new_tokens=rounds * (trial.num_speculative_tokens + 1),
    )  # fmt: skip
    state, step = job.start(), jax.jit(_round_and_proposals)
    for number in range(rounds):
        state, kept, fresh = jax.device_get(step(job.decoder, state))
        live = kept.valid & state.active[:, None]
        where = f"{trial}: after round {number + 1} the proposal differs from a fresh one on the same prefix"
        assert np.array_equal(live, fresh.valid & state.active[:, None]), f"{where}, in what is valid"
        assert np.array_equal(kept.tokens[live], fresh.tokens[live]), f"{where}, in tokens"
        if kept.probs is not None:
            gap = np.abs(kept.probs[live] - fresh.probs[live]).max(initial=0.0)
            assert gap <= tolerance, f"{where}, in probabilities by {gap:.1e}"


def _round_and_proposals(decoder: Decoder, state: DecodeState) -> tuple[DecodeState, Draft, Draft]:
    """One round. -> the new state, its next proposal, and the proposal of a fresh drafter on the same prefix."""
    state, _ = rounds_of.round(decoder, state)
    target, drafter, size = decoder.target, decoder.drafter, decoder.num_speculative_tokens
    batch, capacity = state.tokens.shape
    keys = decoder.verifier.draft_keys(state.request.key, state.lengths)
    kept = drafter.propose(target, state.drafter, state, keys, size)[0]
    # A fresh row holds zeros past its length. A round leaves other tokens there, and these must not matter.
    clean = jnp.where(span(capacity) < state.lengths[:, None], state.tokens, 0)
    fresh = state._replace(tokens=clean, drafter=drafter.init(target, batch, capacity, size))
    fresh = fresh._replace(drafter=drafter.resume(target, fresh.drafter, fresh))
    return state, kept, drafter.propose(target, fresh.drafter, fresh, keys, size)[0]


def check_plan(trial: Trial) -> None:
    """Checks that ``plan`` reads static values only, and gives inside a program what it gives outside.

    A round asks for the plan while it is compiled. The leaves of target and drafter then have shapes and no values.
    """
    size = trial.num_speculative_tokens
    plan = trial.drafter.plan(trial.target, size)

    def compiled(target, drafter):
        inside = drafter.plan(target, size)
        assert inside == plan, f"{trial}: the plan is {plan}, but {inside} inside a program"

    try:
        jax.eval_shape(compiled, trial.target, trial.drafter)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise AssertionError(
            f"{trial}: plan reads the value of a leaf, and in a program a leaf has none. A plan may only read static "
            "values: shapes, dtypes, and fields of the class that are no leaves. Keep what plan needs in such a field."
        ) from error


def check_proposal(trial: Trial) -> None:
    """Checks the form of a proposal.

    Shapes and dtypes must be right. In a tree, parents must stand before their children. q must sum to 1, and q of each
    drafted token must be above 0.
    """
    size, vocab = trial.num_speculative_tokens, trial.target.config.vocab_size
    job = prepare(
        trial.target, PROMPTS, drafter=trial.drafter, verifier=trial.verifier, num_speculative_tokens=size,
        temperature=1.0, lossy=True,
    )  # fmt: skip
    decoder = job.decoder
    if decoder.num_speculative_tokens == 0:
        return
    plan = decoder.plan
    assert sorted(plan.widths) == list(plan.widths) and plan.block > size, (
        f"{trial}: widths {plan.widths} must rise to K + 1 or more"
    )
    keys, state = decoder.verifier.draft_keys(job.request.key, job.request.prompt_lengths), job.start()
    propose = jax.jit(lambda d, state, keys: d.drafter.propose(d.target, state.drafter, state, keys, size)[0])
    draft = propose(decoder, state, keys)
    rows, nodes = len(PROMPTS), plan.block - 1
    assert draft.tokens.shape == (rows, nodes) and draft.tokens.dtype == jnp.int32, f"{trial}: tokens must be i32[B, N]"
    assert draft.valid.shape == (rows, nodes) and draft.valid.dtype == bool, f"{trial}: valid must be bool[B, N]"
    assert draft.shape.is_tree <= plan.trees, f"{trial}: the draft is a tree, but the plan says that drafts are chains"
    if draft.shape.is_tree:
        parents = np.asarray(draft_shape.parents_of(draft.shape, rows, nodes))
        assert ((parents >= 0) & (parents <= np.arange(nodes))).all(), f"{trial}: a node stands before its parent"
        depth = int((draft.shape.depths(nodes)[:, 1:] * draft.valid).max())
        assert depth <= size, f"{trial}: a tree {depth} deep, but K is {size}"
    else:
        assert nodes == size, f"{trial}: a chain of {nodes} tokens, but K is {size}"
    tokens, valid = np.asarray(draft.tokens), np.asarray(draft.valid)
    assert ((tokens >= 0) & (tokens < vocab))[valid].all(), f"{trial}: a drafted token is outside the vocabulary"
    if draft.probs is not None:
        assert draft.probs.shape == (rows, nodes, vocab) and draft.probs.dtype == jnp.float32, f"{trial}: q must be f32"
        probs = np.asarray(draft.probs)
        assert np.allclose(probs[valid].sum(-1), 1, atol=1e-4), f"{trial}: q doesn't sum to 1"
        assert (probs_of(probs, tokens)[valid] > 0).all(), f"{trial}: q of a draft is 0"


def check_drafter(drafter: Drafter, target: LM | None = None, path_independent: bool = True, **trial) -> None:
    """Runs all checks of a drafter, with the verifiers ``rejection`` and ``coupled``, and on trees ``traversal``.

    Args:
      drafter: the drafter under test, made for ``target``.
      target: a model with 4 to 8 tokens, so that all continuations can be enumerated. None:
        ``tiny_lm(vocab_size=4, std=0.7)``.
      path_independent: whether a proposal depends on the prefix alone. False for a drafter that keeps more than the
        prefix from round to round (Jacobi, lookahead).
      **trial: other fields of :class:`Trial`.

    Raises:
      AssertionError: a law is broken. The message names the law.
    """
    target = tiny_lm(vocab_size=4, std=0.7) if target is None else target
    size = trial.get("num_speculative_tokens", Trial.num_speculative_tokens)
    on_trees = ("traversal",) if drafter.plan(target, size).trees else ()  # asks more of a tree's draws
    for verifier in ("rejection", "coupled", *on_trees):
        one = Trial(target, drafter, verifier, **trial)
        check_plan(one)
        check_proposal(one)
        check_law(one)
        check_rows_alone(one)
        check_same_as_plain(one, greedy=verifier != "coupled")
        check_no_retrace(one)
    if path_independent:
        check_path_independence(Trial(target, drafter, **trial))


def check_verifier(verifier: Verifier, **trial) -> None:
    """Runs all checks of a lossless verifier, with drafts that are sampled, point masses, missing or trees.

    Args:
      verifier: the verifier under test.
      **trial: other fields of :class:`Trial`.

    Raises:
      AssertionError: a law is broken. The message names the law.
    """
    target = trial.pop("target", None) or tiny_lm(vocab_size=4, std=0.7)
    check_verdicts(verifier)
    twin = noisy_twin(target, 0.2)
    trees = (TreeModel(twin, (2, 2, 1), prefill_chunk=4),) if verifier.trees else ()
    for drafter in (DraftModel(twin, prefill_chunk=4), PromptLookup(), *trees):
        one = Trial(target, drafter, verifier, **trial)
        check_law(one)
        check_rows_alone(one)
        check_same_as_plain(one)
    check_accepts_all(Trial(target, DraftModel(target, prefill_chunk=4), verifier, **trial))


def lossless_verifiers() -> list[str]:
    """The names of those verifiers of specjax that keep the target's distribution."""
    return [name for name, verifier in VERIFIERS.items() if verifier.lossless]
