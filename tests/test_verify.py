"""Verifiers on distributions given as tables: exact laws by enumeration where the draws are few, sampled ones else.

The tables are bigram: row t is the law after token t. Enumeration takes every draft as one row of a batch, weighted
with its probability, and integrates the acceptance uniforms away.
"""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import specjax
from specjax import random
from specjax.drafters import DraftModel
from specjax.testing import table_lm
from specjax.types import Draft
from specjax.verify import (
    VERIFIERS,
    Block,
    Lenient,
    LenientGreedy,
    Rejection,
    TypicalAcceptance,
    block,
    chain,
    multi,
    without_replacement,
)

LOSSLESS = [name for name, verifier in VERIFIERS.items() if verifier.lossless]
each_lossless = pytest.mark.parametrize("name", LOSSLESS)
each_table = pytest.mark.parametrize("seed", range(6))


def tables(seed: int, vocab: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """p and q, f[V, V]. Odd seeds have zeros, in both and at different places."""
    rng = np.random.default_rng(seed)
    p, q = (rng.dirichlet(np.full(vocab, 0.7), vocab) for _ in range(2))
    if seed % 2:
        p[0, 1] = q[0, 2] = q[1, 0] = p[2, 0] = q[2, 0] = 0
    return p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)


def chisquare(counts: np.ndarray, probs: np.ndarray) -> float:
    """The p-value of counts under probs; cells expected below 5 are pooled, and what can't happen must not."""
    expected = np.asarray(probs, np.float64) / np.sum(probs, dtype=np.float64) * counts.sum()
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    keep = expected > 0
    return stats.chisquare(counts[keep], expected[keep]).pvalue


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    return 0.5 * np.abs(a - b).sum()


def power_law(p: np.ndarray, first: int, length: int) -> np.ndarray:
    """The exact law of ``length`` tokens after ``first`` under plain sampling, f[V, ..., V]."""
    law = p[first]
    for _ in range(length - 1):
        law = law[..., None] * p
    return law


# ---- a round in the small: tables instead of models ----

# Everything sampled has these shapes, padded with impossible tokens and invalid slots: few programs to compile.
ROWS, SIZE, VOCAB = 20_000, 5, 5
KEYS = random.request_keys(np.arange(ROWS))
ONES = jnp.ones(ROWS, jnp.int32)


def pad(table: np.ndarray) -> jax.Array:
    """f[..., V] to f32[..., VOCAB]; a square table gets rows too."""
    more = [(0, 0)] * (table.ndim - 1) + [(0, VOCAB - table.shape[-1])]
    if table.ndim == 2:
        more[0] = (0, VOCAB - table.shape[0])
    return jnp.asarray(np.pad(table, more), jnp.float32)


@functools.partial(jax.jit, static_argnames="verifier")
def drafts(verifier, q, tokens, lengths, keys) -> Draft:
    """SIZE tokens a row from the table q f32[V, V], with the keys that a drafter is given."""
    draft_keys = verifier.draft_keys(keys, lengths)

    def step(last, i):
        row = q[last]  # [B, V]
        token = random.categorical(random.at(draft_keys, (lengths + i)[:, None]), row[:, None])[:, 0]
        return token, (token, row)

    _, (drawn, rows) = jax.lax.scan(step, tokens, jnp.arange(SIZE))
    return Draft(drawn.T, jnp.ones(drawn.T.shape, bool), rows.swapaxes(0, 1))


def greedy_drafts(q, tokens) -> Draft:
    """The most likely tokens, as point masses."""
    best, columns = np.argmax(q, axis=1), [np.asarray(tokens)]
    for _ in range(SIZE):
        columns.append(best[columns[-1]])
    drafted = jnp.asarray(np.stack(columns[1:], 1), jnp.int32)
    return Draft(drafted, jnp.ones(drafted.shape, bool), None)


@functools.partial(jax.jit, static_argnames="verifier")
def judge(verifier, p, draft, keys, lengths):
    return verifier.verify(p, draft, keys, lengths)[:2]  # of a chain there is no node


def table_round(verifier, size, p, q, tokens=0 * ONES, lengths=ONES, keys=KEYS, greedy=False):
    """Drafts ``size`` tokens and judges them. -> (draft, (count, token)), on the host."""
    draft = greedy_drafts(q, tokens) if greedy else drafts(verifier, q, tokens, lengths, keys)
    draft = draft._replace(valid=draft.valid & (np.arange(SIZE) < size))
    rows = p[jnp.concatenate([tokens[:, None], draft.tokens], 1)]
    return jax.device_get((draft, judge(verifier, rows, draft, keys, lengths)))


def sample(verifier, size, p, q, length, greedy=False, seed=0) -> np.ndarray:
    """Counts of the first ``length`` tokens after token 0, i[V, ..., V], over rounds as ``generate`` runs them."""
    vocab, p, q = len(p), pad(p), pad(q)
    keys, every = random.request_keys(np.arange(ROWS) + seed * ROWS), np.arange(ROWS)
    text, lengths = np.zeros((ROWS, 2 + length + SIZE), np.int32), np.ones(ROWS, np.int32)
    while lengths.min() <= length:
        last = jnp.asarray(text[every, lengths - 1])
        draft, (count, token) = table_round(verifier, size, p, q, last, jnp.asarray(lengths), keys, greedy)
        block = np.where(np.arange(SIZE) < count[:, None], draft.tokens, token[:, None])
        block = np.append(block, token[:, None], 1)  # [B, SIZE + 1]
        running = lengths <= length
        for i in range(SIZE + 1):
            rows = running & (i <= count)
            text[rows, (lengths + i)[rows]] = block[rows, i]
        lengths = lengths + running * (count + 1)
    return np.histogramdd(text[:, 1 : 1 + length], bins=[np.arange(vocab + 1)] * length)[0]


# ---- the exact law of a round ----


def every_draft(p, q, size, first=0):
    """All drafts of ``size`` tokens: their probability f[N], p f32[N, K+1, V] and the Draft."""
    tokens = np.array(list(itertools.product(range(len(p)), repeat=size)))  # [N, K]
    before = np.concatenate([np.full((len(tokens), 1), first), tokens], 1)  # [N, K+1]
    weight = np.prod(q[before[:, :-1], tokens], axis=1)
    p_rows, q_rows = (jnp.asarray(x, jnp.float32) for x in (p[before], q[before[:, :-1]]))
    return weight, p_rows, Draft(jnp.asarray(tokens, jnp.int32), jnp.ones(tokens.shape, bool), q_rows)


def chain_rule(accept, rest_of):
    """P(count) and the drawn-from law of a verifier that judges token by token."""

    def law(p, draft):
        a = np.asarray(accept(p, draft), np.float64) * draft.valid  # [N, K]
        kept = np.cumprod(np.pad(a, ((0, 0), (1, 0)), constant_values=1), 1)  # [N, K+1]
        return kept * (1 - np.pad(a, ((0, 0), (0, 1)))), rest_of

    return law


@jax.jit
def residual_at(p, draft, count):
    return chain.residual(chain.row_at(p, count), chain.draft_at(draft, count, p.shape[-1]))


@jax.jit
def ratio(p, draft, lenience=1.0):
    p_x, q_x = chain.token_probs(p[:, :-1], draft.tokens), chain.draft_token_probs(draft)
    return jnp.where(q_x > 0, jnp.minimum(1, p_x / jnp.where(q_x > 0, lenience * q_x, 1)), 0)


@jax.jit
def block_thresholds(p, draft):
    return block.thresholds(p, draft, block.weights(p, draft))


@jax.jit
def block_remainder(p, draft, count):
    return block.remainder(p, draft, block.weights(p, draft), count)


def block_law(p, draft):
    h = np.asarray(block_thresholds(p, draft), np.float64)  # [N, K]
    refused = np.cumprod(np.pad(1 - h, ((0, 0), (0, 1)), constant_values=1)[:, ::-1], 1)[:, ::-1]  # of all longer
    return np.pad(h, ((0, 0), (1, 0)), constant_values=1) * refused, block_remainder


@jax.jit
def typical_at(p, draft, epsilon=0.09, delta=0.3):
    p_x = chain.token_probs(p[:, :-1], draft.tokens)
    entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0), -1)[:, :-1]
    return p_x > jnp.minimum(epsilon, delta * jnp.exp(-entropy))


LAWS = {
    Rejection(): chain_rule(ratio, residual_at),
    Block(): block_law,
    **{Lenient(x): chain_rule(functools.partial(ratio, lenience=x), residual_at) for x in (1.0, 0.5, 0.3, 0.1)},
    TypicalAcceptance(): chain_rule(typical_at, jax.jit(lambda p, draft, count: chain.row_at(p, count))),
}


def outcomes(verifier, weight, p, draft):
    """What a round commits, with its probability: pairs (tuple of tokens, float), and the expected count."""
    counts, rest_of = LAWS[verifier](p, draft)  # [N, K+1]
    committed, tokens, mean = collections.Counter(), np.asarray(draft.tokens).tolist(), 0.0
    for i in range(counts.shape[1]):
        rest = np.asarray(rest_of(p, draft, jnp.full(len(tokens), i, jnp.int32)), np.float64)
        rest = rest / np.maximum(rest.sum(1, keepdims=True), 1e-300)
        mean += i * float(weight @ counts[:, i])
        for n in np.flatnonzero(weight * counts[:, i]):
            for y in np.flatnonzero(rest[n]).tolist():
                committed[*tokens[n][:i], y] += weight[n] * counts[n, i] * rest[n, y]
    return list(committed.items()), mean


def joint_law(verifier, p, q, size, length) -> np.ndarray:
    """The exact law of the first ``length`` tokens after token 0, round after round."""
    rounds = {t: outcomes(verifier, *every_draft(p, q, size, t))[0] for t in range(len(p))}
    law = np.zeros((len(p),) * length)

    def go_on(text, prob, last):
        if len(text) >= length:
            law[text[:length]] += prob
            return
        for tokens, chance in rounds[last]:
            go_on((*text, *tokens), prob * chance, tokens[-1])

    go_on((), 1.0, 0)
    return law


# ---- block verification ----


@each_table
@pytest.mark.parametrize("size", [1, 2, 3])
def test_block_commits_with_the_targets_law(size, seed):
    """Whatever a round commits, followed by plain sampling, has the target's law: checked on all size + 1 tokens."""
    p, q = tables(seed)
    committed, _ = outcomes(Block(), *every_draft(p, q, size))
    law = np.zeros((3,) * (size + 1))
    for tokens, prob in committed:
        missing = size + 1 - len(tokens)
        law[tokens] += prob * (power_law(p, tokens[-1], missing) if missing else 1)
    np.testing.assert_allclose(law, power_law(p, 0, size + 1), atol=1e-6)


@each_table
def test_block_ends_at_each_rows_own_last_token(seed):
    """Chains cut short, at a place that depends on the tokens before it as at a drafted stop token, and none at all."""
    p, q = tables(seed)
    weight, p_rows, draft = every_draft(p, q, 3)
    tokens = np.asarray(draft.tokens)
    cut = np.cumsum(np.pad(tokens == 1, ((0, 0), (1, 0)))[:, :-1], 1) == 0  # nothing follows a drafted 1
    for valid in (cut, cut & (np.arange(3) < 2), np.zeros_like(cut)):
        # Garbage past the end must not matter: neither NaN nor the zeros of positions that were never scored.
        past = ~np.pad(valid, ((0, 0), (1, 0)), constant_values=True)[..., None]
        for garbage in (np.nan, 0.0):
            ragged = Draft(draft.tokens, jnp.asarray(valid), jnp.where(valid[..., None], draft.probs, garbage))
            committed, _ = outcomes(Block(), weight, jnp.where(past, garbage, p_rows), ragged)
            law = np.zeros((3,) * 4)
            for text, prob in committed:
                law[text] += prob * (power_law(p, text[-1], 4 - len(text)) if len(text) < 4 else 1)
            np.testing.assert_allclose(law, power_law(p, 0, 4), atol=1e-6)


@pytest.mark.parametrize(("vocab", "size"), [(3, 2), (3, 3), (4, 2), (4, 3)])
def test_block_keeps_at_least_as_many_as_rejection(vocab, size):
    """The paper's claim, on 20 pairs of tables."""
    gains = []
    for seed in range(20):
        arguments = every_draft(*tables(seed, vocab), size)
        gains.append(outcomes(Block(), *arguments)[1] - outcomes(Rejection(), *arguments)[1])
    assert min(gains) > -1e-6
    assert max(gains) > 0.05


def test_block_on_the_papers_own_example():
    """Sun et al. 2024, introduction: two tokens, no context, K = 2; 10/9 kept token by token, 11/9 as a block."""
    p, q = np.tile([1 / 3, 2 / 3], (2, 1)), np.tile([2 / 3, 1 / 3], (2, 1))
    arguments = every_draft(p, q, 2)
    assert outcomes(Rejection(), *arguments)[1] == pytest.approx(10 / 9, abs=1e-6)
    assert outcomes(Block(), *arguments)[1] == pytest.approx(11 / 9, abs=1e-6)


def test_block_equals_rejection_for_one_token():
    p, q = tables(2)
    arguments = every_draft(p, q, 1)
    assert outcomes(Block(), *arguments)[1] == pytest.approx(outcomes(Rejection(), *arguments)[1], abs=1e-6)


class OneDraftKey(Block):
    """Block without the round's start in its draft keys: wrong, and here to be found out."""

    def draft_keys(self, keys, lengths):
        return Rejection().draft_keys(keys, lengths)


class OneAcceptKey(Block):
    """The same for its uniforms."""

    def verify(self, p, draft, keys, lengths):
        verdict = Block.verify(self, p, draft, keys, jnp.zeros_like(lengths))
        return verdict._replace(token=Block.verify(self, p, draft, keys, lengths).token)


def test_block_over_generated_rounds():
    """Four tokens of ``generate`` in rounds of three drafted ones, on tables that refuse often."""
    p, q = tables(0)
    result = specjax.generate(
        table_lm(p), [[0]] * 6000, drafter=DraftModel(table_lm(q), prefill_chunk=4), verifier=Block(),
        num_speculative_tokens=3, max_new_tokens=4, temperature=1.0,
    )
    counts = np.histogramdd(np.array(result.tokens), bins=[np.arange(4)] * 4)[0]
    assert chisquare(counts.ravel(), power_law(p, 0, 4).ravel()) > 1e-4


@pytest.mark.parametrize("verifier", [Block(), OneDraftKey(), OneAcceptKey()], ids=lambda v: type(v).__name__)
def test_block_draws_anew_in_every_round(verifier):
    """Rounds that share a draft key or a uniform are far off the law, so this test would see them."""
    pvalues = [
        chisquare(sample(verifier, size, *tables(seed), 4, seed=seed).ravel(), power_law(tables(seed)[0], 0, 4).ravel())
        for size, seed in ((2, 0), (3, 2))
    ]
    assert min(pvalues) > 1e-4 if type(verifier) is Block else min(pvalues) < 1e-8


# ---- all verifiers ----


@each_lossless
@pytest.mark.parametrize("greedy", [False, True], ids=["drawn", "greedy"])
def test_joint_law_over_rounds(name, greedy):
    """Four tokens over rounds of two and three drafted ones, against plain sampling's exact law."""
    for size, seed in ((2, 4), (3, 1)):
        p, q = tables(seed)
        counts = sample(VERIFIERS[name], size, p, q, 4, greedy=greedy, seed=seed)
        assert chisquare(counts.ravel(), power_law(p, 0, 4).ravel()) > 1e-4


@each_lossless
@pytest.mark.parametrize("greedy", [False, True], ids=["drawn", "greedy"])
@pytest.mark.parametrize("size", [1, 4])
def test_b01_a_greedy_draft_is_one_hot(name, greedy, size):
    """Dividing by the softmax that the greedy token was not drawn from would give token 0 a share of 0.83."""
    p, q = np.full((2, 2), 0.5), np.tile([0.6, 0.4], (2, 1))
    assert chisquare(sample(VERIFIERS[name], size, p, q, 1, greedy=greedy), p[0]) > 1e-4


@each_lossless
def test_b03_the_residual_is_normalised_and_keeps_its_zeros(name):
    p, q = np.tile([0.7, 0.3, 0, 0], (4, 1)), np.tile([0.1, 0.9, 0, 0], (4, 1))
    counts = sample(VERIFIERS[name], 1, p, q, 2)
    assert counts[2:].sum() == counts[:, 2:].sum() == 0
    assert chisquare(counts.ravel(), power_law(p, 0, 2).ravel()) > 1e-4


@each_lossless
def test_b07_the_bonus_follows_the_last_accepted_token(name):
    """A target that nearly always moves on: the bonus of the row before would repeat a token."""
    p = np.eye(5)[(np.arange(5) + 1) % 5] * 0.875 + 0.025
    for size in (1, 2):
        counts = sample(VERIFIERS[name], size, p, p, size + 1)
        assert chisquare(counts.ravel(), power_law(p, 0, size + 1).ravel()) > 1e-4


@each_lossless
@pytest.mark.parametrize("greedy", [False, True], ids=["one_hot_q", "none_q"])
def test_b09_temperature_0_takes_the_targets_own_token(name, greedy):
    """Both are one-hot then; a draft that agrees is accepted, one that doesn't never is."""
    p, q = np.eye(3)[[1, 2, 0]], np.eye(3)[[1, 0, 0]]  # agree after 0 and 2, not after 1
    draft, (count, token) = table_round(VERIFIERS[name], 3, pad(p), pad(q), greedy=greedy)
    assert (draft.tokens[:, :3] == [1, 0, 1]).all() and (count == 1).all() and (token == 2).all()


@each_lossless
def test_b11_padding_is_never_accepted(name):
    """Three and five real drafts of five, identical to the target's; past them zeros, NaN, or just as good a draft."""
    table = np.tile([0.4, 0.3, 0.2, 0.1], (4, 1))
    drawn = drafts(VERIFIERS[name], pad(table), 0 * ONES, ONES, KEYS)
    real = np.where(np.arange(ROWS) % 2 == 0, 3, 5)
    valid = np.arange(SIZE) < real[:, None]
    scored = np.arange(SIZE + 1) <= real[:, None]
    p = np.tile(np.asarray(pad(table)[0]), (ROWS, SIZE + 1, 1))
    for past in (0, np.nan, p[:1, :1]):
        for tokens in (drawn.tokens, jnp.where(valid, drawn.tokens, -1)):
            draft = Draft(tokens, jnp.asarray(valid), jnp.where(valid[..., None], drawn.probs, past))
            rows = jnp.where(scored[..., None], p, past).astype(jnp.float32)
            count, token = judge(VERIFIERS[name], rows, draft, KEYS, ONES)
            assert (count == real).all()
            assert chisquare(np.bincount(token, minlength=4), table[0]) > 1e-4


@each_lossless
def test_b11_zero_over_zero_is_a_refusal(name):
    """A drafted token that neither p nor q can produce, as the first of a chain and as the second."""
    one, other = np.eye(VOCAB)[0], np.array([0, 0.5, 0.5, 0, 0])
    for place in (0, 1):
        p = jnp.asarray(np.tile([one] * place + [other] * (SIZE + 1 - place), (ROWS, 1, 1)), jnp.float32)
        draft = Draft(jnp.zeros((ROWS, SIZE), jnp.int32), jnp.ones((ROWS, SIZE), bool), p[:, :-1])
        count, token = judge(VERIFIERS[name], p, draft, KEYS, ONES)
        assert (count == place).all() and (token != 0).all()


@pytest.mark.parametrize("verifier", [Rejection(), Block(), Lenient(0.9)], ids=lambda v: type(v).__name__)
def test_b12_an_empty_residual_falls_back_to_the_target(verifier, monkeypatch):
    """p is q but for rounding, and a refusal is forced: the draw is from p, and by no means always token 0."""
    p = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    monkeypatch.setattr(random, "uniform", lambda keys: jnp.full(keys.shape, 2.0))
    forced = jax.jit(verifier.verify)  # traced anew, with the uniforms above
    for q in (p, np.nextafter(p, np.float32(1))):
        draft = Draft(jnp.full((ROWS, 1), 3, jnp.int32), jnp.ones((ROWS, 1), bool), jnp.tile(q, (ROWS, 1, 1)))
        count, token, _ = forced(jnp.tile(p, (ROWS, 2, 1)), draft, KEYS, ONES)
        assert (count == 0).all()
        assert chisquare(np.bincount(token, minlength=4), p) > 1e-4


@each_lossless
@pytest.mark.parametrize("size", [1, 3, 5])
def test_b93_a_draft_equal_to_the_target_is_accepted_whole(name, size):
    """Comparing with a draw of the target's own, the faulty rule, would accept 0.30 of these."""
    p = pad(np.tile([0.4, 0.3, 0.2, 0.1], (4, 1)))
    _, (count, _) = table_round(VERIFIERS[name], size, p, p)
    assert (count == size).all()


@each_lossless
def test_nothing_drafted_is_a_plain_draw(name):
    """K = 0, with the very token that plain decoding draws at this position."""
    p = jnp.tile(jnp.array([0.5, 0.2, 0.3]), (100, 1, 1))
    keys, lengths = random.request_keys(np.arange(100)), jnp.full(100, 7)
    draft = Draft(jnp.zeros((100, 0), jnp.int32), jnp.zeros((100, 0), bool), None)
    count, token, _ = VERIFIERS[name].verify(p, draft, keys, lengths)
    assert (count == 0).all() and (token == chain.draw(keys, lengths, p[:, 0])).all()


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_rows_verdict_does_not_depend_on_the_others(name):
    p, q = (pad(x) for x in tables(2))
    rows = (jnp.arange(ROWS) % 3, jnp.arange(ROWS) % 97 + 1, KEYS)
    other = np.random.default_rng(0).permutation(ROWS)
    straight = table_round(VERIFIERS[name], 3, p, q, *rows)
    shuffled = table_round(VERIFIERS[name], 3, p, q, *(x[other] for x in rows))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a[other] == b).all(), straight, shuffled))


# ---- several proposals for one position ----


def every_sibling(p, q, size, replace):
    """All draws of ``size`` siblings from q: their probability, p, q_k and the proposals."""
    choose = itertools.product(range(len(q)), repeat=size) if replace else itertools.permutations(range(len(q)), size)
    drawn = np.array(list(choose))
    own = np.tile(q, (len(drawn), 1)).astype(np.float32)
    q_k = jnp.tile(own[:, None], (1, size, 1)) if replace else jax.jit(without_replacement)(own, drawn)
    weight = np.prod(np.take_along_axis(np.asarray(q_k, np.float64), drawn[..., None], 2)[..., 0], 1)
    return weight, jnp.tile(jnp.asarray(p, jnp.float32), (len(drawn), 1)), q_k, jnp.asarray(drawn)


def sibling_by_sibling(p, q_k, drawn):
    """The chance of accepting each sibling once those before it are refused, f[B, M], and what is aimed at then."""
    r, mass, h = p, jnp.ones(len(p)), []
    for k in range(drawn.shape[1]):
        r_x, q_x = (np.take_along_axis(np.asarray(x), np.asarray(drawn[:, k, None]), 1)[:, 0] for x in (r, q_k[:, k]))
        h.append(np.where(q_x > 0, np.minimum(1.0, r_x / mass / np.where(q_x > 0, q_x, 1)), 0.0))
        r, mass = jax.jit(multi.after_refusal)(r, mass, q_k[:, k])
    return np.stack(h, 1), np.asarray(r / mass[:, None], np.float64)


@pytest.mark.parametrize("replace", [True, False], ids=["replaced", "not_replaced"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@each_table
def test_b08_siblings_leave_the_targets_law(seed, size, replace):
    """By enumeration, on skewed p and q, duplicates included; as many siblings as tokens accept one for certain."""
    p, q = (x[0] for x in tables(2 * (seed // 2) + (0 if size == 5 else seed % 2), 5))
    weight, p_rows, q_k, drawn = every_sibling(p, q, size, replace)
    assert weight.sum() == pytest.approx(1, abs=1e-6)
    h, rest = sibling_by_sibling(p_rows, q_k, drawn)
    law, reached = np.zeros(5), weight
    for k in range(size):
        np.add.at(law, np.asarray(drawn[:, k]), reached * h[:, k])
        reached = reached * (1 - h[:, k])
    law += reached @ rest
    np.testing.assert_allclose(law, p, atol=1e-6)
    if size == 5 and not replace:
        assert reached.sum() < 1e-6


def test_b08_siblings_from_different_drafts_and_padding():
    """Each from its own q_k; one that is padding (a row of zeros) is never accepted."""
    p, q = (jnp.asarray(x, jnp.float32) for x in tables(4, 4))
    pairs = np.array(list(itertools.product(range(4), repeat=2)))
    q_k = jnp.stack([q[0], jnp.zeros(4), q[1]])
    drawn = jnp.asarray(np.insert(pairs, 1, 2, axis=1))
    h, rest = sibling_by_sibling(jnp.tile(p[0], (16, 1)), jnp.tile(q_k, (16, 1, 1)), drawn)
    assert (h[:, 1] == 0).all()
    weight = q[0][pairs[:, 0]] * q[1][pairs[:, 1]]
    law = jnp.zeros(4).at[pairs[:, 0]].add(weight * h[:, 0])
    law = law.at[pairs[:, 1]].add(weight * (1 - h[:, 0]) * h[:, 2])
    law += (weight * (1 - h[:, 0]) * (1 - h[:, 2])) @ rest
    np.testing.assert_allclose(law, p[0], atol=1e-6)


def test_one_sibling_is_rejection():
    p, q = tables(4, 4)
    weight, p_rows, q_k, drawn = every_sibling(p[0], q[0], 1, True)
    draft = Draft(drawn, jnp.ones(drawn.shape, bool), q_k)
    h, _ = sibling_by_sibling(p_rows, q_k, drawn)
    np.testing.assert_allclose(h, ratio(jnp.tile(p_rows[:, None], (1, 2, 1)), draft), rtol=1e-6)


def test_without_replacement_until_nothing_is_left():
    rows = without_replacement(jnp.array([[0.5, 0.5, 0.0]]), jnp.array([[1, 0, 2]]))
    np.testing.assert_allclose(rows[0], [[0.5, 0.5, 0], [1, 0, 0], [0, 0, 0]])


# ---- lossy modes: what they keep and what they cost ----


@each_table
@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.3, 0.1])
def test_lenience_bounds_every_token(lenience, seed):
    """No token becomes likelier than p/l; without draft or at l = 1 the law is p."""
    p, q = tables(seed)
    law = np.zeros((3, 3))
    for first in range(3):
        for tokens, prob in outcomes(Lenient(lenience), *every_draft(p, q, 1, first))[0]:
            law[first, tokens[0]] += prob
    assert (law <= p / lenience + 1e-6).all()
    assert (law <= np.maximum(p, q) + 1e-6).all()
    if lenience == 1:
        np.testing.assert_allclose(law, p, atol=1e-6)


@pytest.mark.parametrize("greedy", [False, True])
def test_lenience_1_is_rejection_token_for_token(greedy):
    p, q = (pad(x) for x in tables(1))
    rows = (jnp.arange(ROWS) % 3, jnp.arange(ROWS) % 7, KEYS)
    exact, lenient = (table_round(v, 3, p, q, *rows, greedy) for v in (Rejection(), Lenient(1.0)))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), exact, lenient))


@pytest.mark.parametrize("verifier", [Lenient(0.3), TypicalAcceptance()], ids=repr)
@pytest.mark.parametrize("seed", [1, 2])
def test_lossy_laws_are_as_enumerated(verifier, seed):
    """The distances below are of laws computed here; this ties them to what ``verify`` does."""
    p, q = tables(seed)
    law = joint_law(verifier, p, q, 2, 3)
    assert law.sum() == pytest.approx(1, abs=1e-5)
    law[law < 1e-9] = 0
    assert chisquare(sample(verifier, 2, p, q, 3).ravel(), law.ravel()) > 1e-4


def cost(verifier) -> tuple[float, float, float]:
    """Mean and largest total-variation distance over three tokens, and mean accepted of two drafted, on six tables."""
    distances, counts = [], []
    for seed in range(6):
        p, q = tables(seed)
        distances.append(total_variation(joint_law(verifier, p, q, 2, 3), power_law(p, 0, 3)))
        counts.append(outcomes(verifier, *every_draft(p, q, 2))[1])
    return float(np.mean(distances)), max(distances), float(np.mean(counts))


def test_what_each_verifier_costs():
    """Lossless ones nothing; a smaller lenience more, for more tokens a round. The figures stand in the docs."""
    costs = {verifier: cost(verifier) for verifier in LAWS}
    for verifier, (mean, worst, count) in costs.items():
        print(f"{verifier!r:45} TV mean {mean:.3f} max {worst:.3f}  accepted {count:.3f} of 2")
    assert all(worst < 1e-5 for v, (_, worst, _) in costs.items() if v.lossless or v == Lenient(1.0))
    lenient = [costs[Lenient(x)] for x in (1.0, 0.5, 0.3, 0.1)]
    assert all(a[0] < b[0] and a[2] < b[2] for a, b in itertools.pairwise(lenient))


def test_lenient_greedy_accepts_near_the_best_and_emits_the_best():
    p = jnp.tile(jnp.array([[0.1, 0.5, 0.4], [0.3, 0.35, 0.35], [0.2, 0.2, 0.6]]), (4, 1, 1))
    draft = Draft(jnp.array([[2, 0], [1, 2], [0, 1], [2, 1]], jnp.int32), jnp.ones((4, 2), bool), None)
    keys, lengths = random.request_keys(np.arange(4)), jnp.ones(4, jnp.int32)
    count, token, _ = LenientGreedy(0.75).verify(p, draft, keys, lengths)
    assert count.tolist() == [2, 2, 0, 2] and token.tolist() == [2, 2, 1, 2]
    count, token, _ = LenientGreedy(1.0).verify(p, draft, keys, lengths)  # ties go to the lowest id
    assert count.tolist() == [0, 1, 0, 0] and token.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("name", ["typical", "lenient", "lenient-greedy"])
def test_lossy_verifiers_are_greedy_at_temperature_0(name):
    p, q = np.eye(3)[[1, 2, 0]], np.eye(3)[[1, 0, 0]]
    _, (count, token) = table_round(VERIFIERS[name], 3, pad(p), pad(q))
    assert (count == 1).all() and (token == 2).all()


@pytest.mark.parametrize("name", ["lenient", "lenient-greedy", "typical"])
def test_lossy_verifiers_are_refused_unless_asked_for(name):
    lm = table_lm(tables(0)[0])
    with pytest.raises(ValueError, match="lossy=True"):
        specjax.generate(lm, [[0]], drafter="ngram", verifier=name)


@pytest.mark.parametrize("make", [Lenient, LenientGreedy, lambda x: TypicalAcceptance(epsilon=x),
                                  lambda x: TypicalAcceptance(delta=x)])
@pytest.mark.parametrize("value", [0, -0.5, 1.5, float("nan"), "0.5", True, None])
def test_lossy_settings_are_checked(make, value):
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        make(value)


@pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=VERIFIERS)
def test_verifiers_are_static_values(verifier):
    """Equal ones share a compiled program."""
    again = dataclasses.replace(verifier)
    assert again == verifier and hash(again) == hash(verifier)
