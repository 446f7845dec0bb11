"""The conformance checks: what every drafter and verifier must satisfy, by assertions that name what broke.

All of them run one batch, :class:`Trial`: rows of several sampling settings and ragged prompts side by side. Calls
that differ in weights, seeds, limits and settings then share one compiled program a drafter and verifier.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode import draft_shape, random, sampling
from specjax.decode import round as rounds_of
from specjax.decode.arrays import span
from specjax.decode.decoder import Decoder
from specjax.decode.history import history_of
from specjax.decode.types import DecodeState, Draft, Drafter, Verifier
from specjax.drafters import DraftModel, NoDraft, PromptLookup
from specjax.generation.generate import prepare
from specjax.models.lm import LM
from specjax.testing.laws import chi_square, count_sequences, joint_law, run_tightly
from specjax.testing.tiny_models import noisy_twin, tiny_lm
from specjax.testing.traces import count_traces
from specjax.verify import VERIFIERS

REJECT_BELOW = 1e-4
# Rows or tokens that rounding may flip: where a product's rounding depends on its shape or a row's place in it, about
# one draw in a million lands on the other side of a boundary. Real faults flip whole percents.
ROUNDING_FLIPS = 1e-3

# Every transform alone, some together, over a vocabulary of at least 4.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature and top-k": {"temperature": 0.7, "top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2, "temperature": 1.5},
    "repetition": {"repetition_penalty": 1.5},
    "presence and frequency": {"presence_penalty": 0.8, "frequency_penalty": -0.5},
    "no repeated trigram": {"no_repeat_ngram_size": 3},
    "bias": {"logit_bias": {0: 1.0, 2: -2.0}},
    "allowed": {"allowed_token_ids": [0, 1, 3]},
    "no early stop": {"min_new_tokens": 5},
    "greedy": {"temperature": 0.0},
}

# The longest has n-grams to look up; the shortest starts with an empty cache.
PROMPTS = [[1, 2, 0, 1, 2, 0], [3], [2, 1, 1, 3]]


@dataclasses.dataclass(frozen=True)
class Trial:
    """What the checks run. The vocabulary must be small enough to enumerate: V ** length continuations.

    Args:
      target: its vocabulary has at least 4 tokens.
      drafter: the drafter under test.
      verifier: the verifier under test, or its name.
      num_speculative_tokens: K.
      rows: a setting has in the batch.
      draws: a setting gets for its joint law, in as many batches as it takes.
      length: tokens whose joint law is compared.
      new_tokens: tokens generated a row; longer than a block, so that rounds follow each other.
    """

    target: LM
    drafter: Drafter
    verifier: Verifier | str = "rejection"
    num_speculative_tokens: int = 3
    rows: int = 200
    draws: int = 1600
    length: int = 4
    new_tokens: int = 9

    def __str__(self) -> str:
        verifier = self.verifier if isinstance(self.verifier, str) else type(self.verifier).__name__
        return f"{type(self.drafter).__name__} with {verifier}, K = {self.num_speculative_tokens}"

    @property
    def batch(self) -> int:
        return len(SETTINGS) * self.rows

    @property
    def prompts(self) -> list[list[int]]:
        return [PROMPTS[i % len(PROMPTS)] for i in range(len(SETTINGS)) for _ in range(self.rows)]

    @property
    def neutral(self) -> dict[str, Any]:
        """Every transform present, none with an effect: other settings then trace the same program."""
        return {
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "no_repeat_ngram_size": 0,
            "logit_bias": {},
            "min_new_tokens": 0,
            "allowed_token_ids": list(range(self.target.config.vocab_size)),
        }

    @property
    def options(self) -> dict[str, list]:
        """One value a row of every sampling parameter, so that no transform is left out of the program."""
        return {
            name: [s.get(name, default) for s in SETTINGS.values() for _ in range(self.rows)]
            for name, default in self.neutral.items()
        }

    def run(self, order: np.ndarray | None = None, **changes) -> DecodeState:
        """The batch, its rows in the given order; ``changes`` are options, one value or one a row."""
        order = np.arange(self.batch) if order is None else order
        options: dict[str, Any] = {"seed": list(range(self.batch)), "max_new_tokens": self.new_tokens, **self.options}
        options |= {"drafter": self.drafter, "verifier": self.verifier, "ignore_eos": "eos_token_id" not in changes}
        options |= {"num_speculative_tokens": self.num_speculative_tokens, "lossy": True, **changes}
        options = {k: [v[i] for i in order] if isinstance(v, list) else v for k, v in options.items()}
        prompts = self.prompts
        return run_tightly(self.target, [prompts[i] for i in order], **options)

    def sequences(self, state: DecodeState) -> list[np.ndarray]:
        """Each row's new tokens."""
        pairs = zip(state.tokens, state.request.prompt_lengths, state.lengths, strict=True)
        return [row[start:end] for row, start, end in pairs]


def check_law(trial: Trial, early_stop: int | None = None) -> None:
    """Under every setting, the first tokens follow plain sampling's exact joint law.

    Args:
      trial: what to run.
      early_stop: a stop token, which none but the last of them may be.
    """
    changes: dict[str, Any] = {}
    if early_stop is not None:
        changes = {"eos_token_id": early_stop, "min_new_tokens": trial.length - 1}
    drawn = []
    for start in range(0, trial.draws, trial.rows):
        seeds = range(start * len(SETTINGS), start * len(SETTINGS) + trial.batch)
        rows = trial.sequences(trial.run(seed=list(seeds), **changes))
        # Settings that forbid tokens may leave nothing to sample from later on, and then the row ends.
        assert min(map(len, rows)) >= trial.length, f"{trial}: a row was left without a distribution"
        drawn.append(np.stack([row[: trial.length] for row in rows]).reshape(len(SETTINGS), trial.rows, -1))
    new = np.concatenate(drawn, axis=1)  # [settings, draws, length]
    for i, (name, setting) in enumerate(SETTINGS.items()):
        options = {**trial.neutral, **setting, **changes}
        law = joint_law(trial.target, PROMPTS[i % len(PROMPTS)], trial.length, **options)
        p_value = chi_square(count_sequences(new[i], trial.target.config.vocab_size), law)
        assert p_value > REJECT_BELOW, f"{trial}: not plain sampling's law under {name!r} (p = {p_value:.1e})"


def check_rows_alone(trial: Trial) -> None:
    """A row's tokens and record depend on neither its place in the batch nor its neighbours."""
    before = trial.run()
    order = np.random.default_rng(0).permutation(len(before.lengths))
    after = trial.run(order)
    for name in ("tokens", "lengths", "rounds", "drafted", "accepted"):
        a, b = _field(before, name)[order], _field(after, name)
        if name == "tokens":  # past its length a row holds leftovers
            a, b = (np.where(np.arange(x.shape[1]) < before.lengths[order, None], x, 0) for x in (a, b))
        differing = np.flatnonzero((a != b).reshape(len(order), -1).any(axis=1))
        assert len(differing) <= ROUNDING_FLIPS * len(order), (
            f"{trial}: {name} of {len(differing)} rows changed with their place"
        )


def _field(state: DecodeState, name: str) -> np.ndarray:
    return getattr(state if hasattr(state, name) else state.history, name)


def check_same_as_plain(trial: Trial, greedy: bool = True) -> set[int]:
    """Token for token plain decoding, at every limit and for every stop token, whatever their place in a block.

    Args:
      trial: what to run.
      greedy: at temperature 0; False: at each setting's own temperature, which only ``coupled`` promises.

    Returns:
      The places in a block, 0 to K, at which stop tokens were met: a check of the check.
    """
    changes: dict[str, Any] = {"temperature": 0.0} if greedy else {}
    plain = dataclasses.replace(trial, drafter=NoDraft(), verifier="rejection")
    longest = plain.sequences(plain.run(**changes))
    limits = [i % (trial.new_tokens + 1) for i in range(len(longest))]
    limits[0] = trial.new_tokens  # the batch's capacity, and so its program, stay those of the other checks
    places: set[int] = set()
    waits = [setting.get("min_new_tokens", 0) for setting in SETTINGS.values() for _ in range(trial.rows)]
    for stop in [None, *range(trial.target.config.vocab_size)]:
        if stop is not None:
            changes["eos_token_id"] = stop
        stopped = plain.sequences(plain.run(**changes))
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
    at = np.flatnonzero(tokens == (sampling.NO_TOKEN if stop is None else stop))
    return tokens[: at[0] + 1] if len(at) else tokens


def check_accepts_all(trial: Trial) -> None:
    """A drafter whose q is the target's p is never refused. Fails unless everything drafted is accepted."""
    history = history_of(trial.run())
    assert history.drafted.sum() > 0, f"{trial}: nothing was drafted"
    refused = int(history.drafted.sum() - history.accepted.sum())
    assert refused <= ROUNDING_FLIPS * history.drafted.sum(), f"{trial}: {refused} tokens refused, though p = q"


def check_acceptance_rate(trial: Trial, alpha: float) -> None:
    """Under the plain setting, reached drafted tokens are accepted at rate alpha, to 4 standard errors."""
    history = history_of(trial.run())
    drafted, accepted = (x[: trial.rows].ravel() for x in (history.drafted, history.accepted))
    reached = accepted.sum() + np.sum(accepted < drafted)
    measured, error = accepted.sum() / reached, np.sqrt(alpha * (1 - alpha) / reached)
    assert abs(measured - alpha) <= 4 * error, f"{trial}: acceptance {measured:.4f}, sum of min(p, q) is {alpha:.4f}"


def check_no_retrace(trial: Trial) -> None:
    """Other seeds, limits, temperatures, prompts and rows in the same shapes trace and compile nothing."""
    trial.run()
    order = np.arange(trial.batch)[::-1]
    with count_traces() as seen:
        trial.run(order, seed=7, temperature=0.5, top_p=0.7, max_new_tokens=trial.new_tokens)
    assert seen.compiled == 0, f"{trial}: {seen.compiled} programs compiled for shapes that had already run"


def check_path_independence(trial: Trial, rounds: int = 6, tolerance: float = 1e-4) -> None:
    """After every round the next proposal is that of a fresh ``init`` on the same prefix.

    A stale draft cache costs only speed, so no test of laws can see it.

    Args:
      trial: what to run; of its batch, one row a prompt.
      rounds: how many.
      tolerance: between probabilities, which differ in rounding as prefixes are fed in other blocks.
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
    state, _ = rounds_of.round(decoder, state)
    target, drafter, size = decoder.target, decoder.drafter, decoder.num_speculative_tokens
    batch, capacity = state.tokens.shape
    keys = decoder.verifier.draft_keys(state.request.key, state.lengths)
    kept = drafter.propose(target, state.drafter, state, keys, size)[0]
    # A fresh row holds nothing past its length; what a round has left there must not matter.
    clean = jnp.where(span(capacity) < state.lengths[:, None], state.tokens, 0)
    fresh = state._replace(tokens=clean, drafter=drafter.init(target, batch, capacity, size))
    fresh = fresh._replace(drafter=drafter.resume(target, fresh.drafter, fresh))
    return state, kept, drafter.propose(target, fresh.drafter, fresh, keys, size)[0]


def check_proposal(trial: Trial) -> None:
    """Shapes, dtypes, the order of a tree, and that q is a distribution which gave its token a chance."""
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
        assert (_of(probs, tokens)[valid] > 0).all(), f"{trial}: q of a draft is 0"


def _of(probs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The probabilities f[B, T, V] of tokens i[B, T]."""
    return np.take_along_axis(probs, tokens[..., None], -1)[..., 0]


def check_drafter(drafter: Drafter, target: LM | None = None, path_independent: bool = True, **trial) -> None:
    """Everything that specjax demands of a drafter, under ``rejection`` and ``coupled``.

    Args:
      drafter: yours, made for ``target``.
      target: a model of 4 to 8 tokens whose laws can be enumerated; by default ``tiny_lm(vocab_size=4, std=0.7)``.
      path_independent: False for a drafter to which its own history matters (Jacobi, lookahead).
      **trial: other fields of :class:`Trial`.

    Raises:
      AssertionError: saying which law broke.
    """
    target = tiny_lm(vocab_size=4, std=0.7) if target is None else target
    for verifier in ("rejection", "coupled"):
        one = Trial(target, drafter, verifier, **trial)
        check_proposal(one)
        check_law(one)
        check_rows_alone(one)
        check_same_as_plain(one, greedy=verifier != "coupled")
        check_no_retrace(one)
    if path_independent:
        check_path_independence(Trial(target, drafter, **trial))


def check_verifier(verifier: Verifier, **trial) -> None:
    """Everything that specjax demands of a lossless verifier, with sampled, point-mass and missing drafts.

    Args:
      verifier: yours.
      **trial: other fields of :class:`Trial`.

    Raises:
      AssertionError: saying which law broke.
    """
    target = trial.pop("target", None) or tiny_lm(vocab_size=4, std=0.7)
    check_verdicts(verifier)
    for drafter in (DraftModel(noisy_twin(target, 0.2), prefill_chunk=4), PromptLookup()):
        one = Trial(target, drafter, verifier, **trial)
        check_law(one)
        check_rows_alone(one)
        check_same_as_plain(one)
    check_accepts_all(Trial(target, DraftModel(target, prefill_chunk=4), verifier, **trial))


def check_verdicts(verifier: Verifier, size: int = 3, vocab: int = 5, rows: int = 512) -> None:
    """On random tables: invalid slots and tokens of p = 0 are never accepted, nor a token of p = 0 drawn.

    A verifier of trees is shown a chain as a tree too, and must give the same verdict.
    """
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.full(vocab, 0.5), (rows, n)).astype(np.float32) for n in (size + 1, size))
    p[rng.random(p.shape) < 0.3] = 0
    p[..., 0] += 1e-3
    p /= p.sum(-1, keepdims=True)
    tokens = rng.integers(vocab, size=(rows, size)).astype(np.int32)
    valid = np.arange(size) < rng.integers(size + 1, size=rows)[:, None]
    q[~valid] = 0  # what padded slots hold
    keys, lengths = random.request_keys(np.arange(rows)), jnp.full(rows, 7, jnp.int32)
    for probs in (jnp.asarray(q), None):
        draft = Draft(jnp.asarray(tokens), jnp.asarray(valid), probs)
        verdict = jax.jit(verifier.verify)(jnp.asarray(p), draft, keys, lengths)
        count, token = np.asarray(verdict.accepted), np.asarray(verdict.token)
        name = type(verifier).__name__
        assert (count <= valid.sum(1)).all() and (count >= 0).all(), f"{name}: accepted a slot that was never drafted"
        taken = np.arange(size) < count[:, None]
        assert (_of(p[:, :size], tokens)[taken] > 0).all(), f"{name}: accepted a token of p = 0"
        assert (p[np.arange(rows), count, token] > 0).all(), f"{name}: drew a token of p = 0"
        if verifier.trees:
            as_tree = draft._replace(shape=draft_shape.FixedTreeShape(tuple(range(size))))
            again = jax.jit(verifier.verify)(jnp.asarray(p), as_tree, keys, lengths)
            same = (again.accepted == count).all() and (again.token == token).all() and (again.node == count).all()
            assert same, f"{name}: judges a tree of width 1 otherwise than a chain"


def lossless_verifiers() -> list[str]:
    """Names of the shipped verifiers that keep the target's law."""
    return [name for name, verifier in VERIFIERS.items() if verifier.lossless]
