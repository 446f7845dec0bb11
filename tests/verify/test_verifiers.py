"""What every verifier must do, and every lossless one, on tables."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import KEYS, ONES, ROWS, SIZE, VOCAB, chisquare, drafts, judge, pad, power_law, sample, table_round, tables

from specjax.decode import random
from specjax.decode.types import Draft
from specjax.verify import VERIFIERS, Block, Lenient, Rejection, Traversal
from specjax.verify import pieces as chain

LOSSLESS = [name for name, verifier in VERIFIERS.items() if verifier.lossless]
each_lossless = pytest.mark.parametrize("name", LOSSLESS)


@each_lossless
@pytest.mark.parametrize("greedy", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["drawn", "greedy"])
def test_joint_law_over_rounds(name, greedy):
    """Four tokens over rounds of two and three drafted ones, against plain sampling's exact law."""
    for size, seed in ((2, 4), (3, 1)):
        p, q = tables(seed)
        counts = sample(VERIFIERS[name], size, p, q, 4, greedy=greedy, seed=seed)
        assert chisquare(counts.ravel(), power_law(p, 0, 4).ravel()) > 1e-4


@each_lossless
@pytest.mark.parametrize("greedy", [False, True], ids=["drawn", "greedy"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_greedy_draft_is_one_hot(name, greedy, size):
    """Dividing by the softmax that the greedy token was not drawn from would give token 0 a share of 0.83."""
    p, q = np.full((2, 2), 0.5), np.tile([0.6, 0.4], (2, 1))
    assert chisquare(sample(VERIFIERS[name], size, p, q, 1, greedy=greedy), p[0]) > 1e-4


@each_lossless
def test_the_residual_is_normalised_and_keeps_its_zeros(name):
    p, q = np.tile([0.7, 0.3, 0, 0], (4, 1)), np.tile([0.1, 0.9, 0, 0], (4, 1))
    counts = sample(VERIFIERS[name], 1, p, q, 2)
    assert counts[2:].sum() == counts[:, 2:].sum() == 0
    assert chisquare(counts.ravel(), power_law(p, 0, 2).ravel()) > 1e-4


@each_lossless
def test_the_bonus_follows_the_last_accepted_token(name):
    """A target that nearly always moves on: the bonus of the row before would repeat a token."""
    p = np.eye(5)[(np.arange(5) + 1) % 5] * 0.875 + 0.025
    for size in (1, 2):
        counts = sample(VERIFIERS[name], size, p, p, size + 1)
        assert chisquare(counts.ravel(), power_law(p, 0, size + 1).ravel()) > 1e-4


@each_lossless
@pytest.mark.parametrize("greedy", [False, True], ids=["one_hot_q", "none_q"])
def test_temperature_0_takes_the_targets_own_token(name, greedy):
    """Both are one-hot then; a draft that agrees is accepted, one that doesn't never is."""
    p, q = np.eye(3)[[1, 2, 0]], np.eye(3)[[1, 0, 0]]  # agree after 0 and 2, not after 1
    draft, (count, token) = table_round(VERIFIERS[name], 3, pad(p), pad(q), greedy=greedy)
    assert (draft.tokens[:, :3] == [1, 0, 1]).all() and (count == 1).all() and (token == 2).all()


@each_lossless
def test_padding_is_never_accepted(name):
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
def test_zero_over_zero_is_a_refusal(name):
    """A drafted token that neither p nor q can produce, as the first of a chain and as the second."""
    one, other = np.eye(VOCAB)[0], np.array([0, 0.5, 0.5, 0, 0])
    for place in (0, 1):
        p = jnp.asarray(np.tile([one] * place + [other] * (SIZE + 1 - place), (ROWS, 1, 1)), jnp.float32)
        draft = Draft(jnp.zeros((ROWS, SIZE), jnp.int32), jnp.ones((ROWS, SIZE), bool), p[:, :-1])
        count, token = judge(VERIFIERS[name], p, draft, KEYS, ONES)
        assert (count == place).all() and (token != 0).all()


def test_the_least_uniform_refuses_what_the_target_never_takes():
    p, q, u = np.array([0.0, 0.1, 0.1]), np.array([0.5, 0.5, 0.0]), np.zeros(3)
    assert chain.accepts(u, p, q).tolist() == [False, True, False]


def test_past_the_end_of_a_rows_chain_nothing_is_subtracted():
    valid = jnp.array([[True, True], [True, False], [False, False]])
    draft = Draft(jnp.zeros((3, 2), jnp.int32), valid, jnp.full((3, 2, 4), 0.25))
    for drafted in (draft, draft._replace(probs=None)):
        assert not chain.draft_at(drafted, jnp.array([2, 1, 0]), 4).any()
        assert chain.draft_at(drafted, jnp.array([1, 0, 0]), 4).sum(axis=1).tolist() == [1, 1, 0]


@pytest.mark.parametrize("verifier", [Rejection(), Block(), Traversal(), Lenient(0.9)], ids=lambda v: type(v).__name__)
def test_an_empty_residual_falls_back_to_the_target(verifier, monkeypatch):
    """p is q but for rounding, and a refusal is forced: the draw is from p, and by no means always token 0."""
    p = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    monkeypatch.setattr(random, "uniform", lambda keys: jnp.full(keys.shape, 2.0))
    forced = jax.jit(verifier.verify)  # traced anew, with the uniforms above
    for q in (p, np.nextafter(p, np.float32(1))):
        draft = Draft(jnp.full((ROWS, 1), 3, jnp.int32), jnp.ones((ROWS, 1), bool), jnp.tile(q, (ROWS, 1, 1)))
        count, token, _ = forced(jnp.tile(p, (ROWS, 2, 1)), draft, KEYS, ONES)
        assert (count == 0).all()
        assert chisquare(np.bincount(token, minlength=4), p) > 1e-4


def test_a_draw_from_the_residual_is_a_draw_from_its_probabilities():
    """Token for token, with p and q that share tokens, and with tokens that only one of them has."""
    p, q = np.random.default_rng(0).dirichlet(np.full(12, 0.3), (2, ROWS)).astype(np.float32)
    p[:, 3], q[:, 4] = 0, 0
    expected = chain.draw(KEYS, ONES, chain.residual(jnp.asarray(p), jnp.asarray(q)))
    np.testing.assert_array_equal(chain.draw_residual(KEYS, ONES, jnp.asarray(p), jnp.asarray(q)), expected)


@each_lossless
@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_draft_equal_to_the_target_is_accepted_whole(name, size):
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


@pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=VERIFIERS)
def test_verifiers_are_static_values(verifier):
    """Equal ones share a compiled program."""
    again = dataclasses.replace(verifier)
    assert again == verifier and hash(again) == hash(verifier)
