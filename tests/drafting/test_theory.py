"""Closed forms against the published tables, against exact arithmetic and against simulation."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafting import theory

RNG_SEED = 20230


def distributions(n, size, seed=RNG_SEED, sharpness=1.0):
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(size, sharpness), n), rng.dirichlet(np.full(size, sharpness), n)


# Leviathan et al. 2023, table 1 (c = c_hat = 0): alpha, gamma, operations, speed.
TABLE_1 = [(0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71),
           (0.9, 10, 1.60, 6.86)]  # fmt: skip


@pytest.mark.parametrize("alpha,gamma,operations,speed", TABLE_1)
def test_leviathan_table_1(alpha, gamma, operations, speed):
    assert round(theory.operations_factor(alpha, gamma, 0), 2) == operations
    assert round(theory.walltime_factor(alpha, gamma, 0), 2) == speed


# Table 4: gamma, alpha, c, expected improvement. alpha and c are printed to two places, the factor to one.
TABLE_4 = [
    (7, 0.75, 0.02, 3.2), (7, 0.8, 0.04, 3.3), (7, 0.82, 0.11, 2.5), (7, 0.62, 0.02, 2.3), (5, 0.68, 0.04, 2.4),
    (3, 0.71, 0.11, 2.0), (5, 0.65, 0.02, 2.4), (5, 0.73, 0.04, 2.6), (3, 0.74, 0.11, 2.0), (5, 0.53, 0.02, 1.9),
    (3, 0.55, 0.04, 1.8), (3, 0.56, 0.11, 1.6),
]  # fmt: skip


@pytest.mark.parametrize("gamma,alpha,c,expected", TABLE_4)
def test_leviathan_table_4_within_the_rounding_of_its_inputs(gamma, alpha, c, expected):
    lowest = theory.walltime_factor(alpha - 0.005, gamma, c + 0.005)
    highest = theory.walltime_factor(alpha + 0.005, gamma, c - 0.005)
    assert lowest < expected + 0.05 and highest > expected - 0.05
    assert theory.walltime_factor(alpha, gamma, c) == pytest.approx(expected, abs=0.07)


@pytest.mark.parametrize("alpha,factor", [(0.75, 3.3), (0.8, 3.9), (0.87, 4.9)])
def test_leviathan_appendix_a5_argmax_factors(alpha, factor):
    """gamma = 8, c = 0.015, as the text says."""
    assert round(theory.walltime_factor(alpha, 8, 0.015), 1) == factor


def test_leviathan_bigram_example():
    """Section 3.6: alpha near 0.2 at no cost gives 1.25 with gamma = 3."""
    assert theory.walltime_factor(0.2, 3, 0) == pytest.approx(1.25, abs=0.005)


@pytest.mark.parametrize("gamma", [1, 3, 5, 7, 10])
def test_leviathan_figure_2_curves(gamma):
    """The curves' ends and, in exact arithmetic, points between; the picture itself has no numbers to copy."""
    assert theory.expected_tokens(0.0, gamma) == 1 and theory.expected_tokens(1.0, gamma) == gamma + 1
    for alpha in (Fraction(1, 4), Fraction(1, 2), Fraction(4, 5), Fraction(99, 100)):
        exact = (1 - alpha ** (gamma + 1)) / (1 - alpha)
        assert theory.expected_tokens(alpha, gamma) == exact
        assert theory.expected_tokens(np.float32(alpha), gamma) == pytest.approx(float(exact), rel=1e-6)


@pytest.mark.parametrize("c", [0.01, 0.02, 0.05, 0.1])
def test_leviathan_figure_3_curves(c):
    """Best gamma as a function of alpha: it maximises theorem 3.8, never falls with alpha, and is 0 below c."""
    alphas = np.linspace(0, 0.99, 100)
    best = theory.best_gamma(alphas, c, 200)
    for alpha, gamma in zip(alphas, best, strict=True):
        closed = [(1 - alpha ** (g + 1)) / ((1 - alpha) * (g * c + 1)) for g in range(201)]
        assert closed[gamma] == pytest.approx(max(closed), rel=1e-12)
    assert (np.diff(best) >= 0).all()
    assert ((best > 0) == (alphas > c)).all()
    assert (best <= theory.best_gamma(alphas, c / 2, 200)).all()


# The book section's table (chapter 9.3): gamma, alpha, E[tokens], speedup.
BOOK = [
    (3, 0.5, 1.88, 1.63), (3, 0.7, 2.75, 2.39), (3, 0.85, 3.48, 3.02), (3, 0.95, 3.90, 3.39),
    (5, 0.5, 1.97, 1.57), (5, 0.7, 3.28, 2.62), (5, 0.85, 4.62, 3.69), (5, 0.95, 5.59, 4.47),
    (8, 0.5, 2.00, 1.43), (8, 0.7, 3.60, 2.57), (8, 0.85, 5.61, 4.00), (8, 0.95, 7.67, 5.48),
]  # fmt: skip


@pytest.mark.parametrize("gamma,alpha,tokens,speedup", BOOK)
def test_book_table(gamma, alpha, tokens, speedup):
    """Its speedups divide its tokens by 1 + 0.05 gamma: c = 0.05. Its tokens follow eq. 1 only at alpha = 0.5.

    The others are too high for any formula with independent positions: 3.60 at alpha = 0.7 passes even 1 / (1 - 0.7).
    The section's own exercise (gamma 5, alpha 0.85) computes 4.15, as eq. 1 does, where its table says 4.62.
    """
    assert tokens / (1 + 0.05 * gamma) == pytest.approx(speedup, abs=0.01)
    ours = theory.expected_tokens(alpha, gamma)
    if alpha == 0.5:
        assert ours == pytest.approx(tokens, abs=0.006)
        assert theory.walltime_factor(alpha, gamma, 0.05) == pytest.approx(speedup, abs=0.006)
    else:
        assert ours < tokens - 0.15
    assert theory.expected_tokens(0.85, 5) == pytest.approx(4.15, abs=0.005)
    assert theory.expected_tokens(0.3, 5) == pytest.approx(1.4, abs=0.05)  # its warning example


def test_corollary_3_9():
    alpha, c = np.meshgrid(np.linspace(0, 1, 21), np.linspace(0.01, 1.2, 21))
    assert (theory.pays(alpha, c) == (theory.walltime_factor(alpha, 1, c) > 1)).all()
    gain = np.stack([theory.walltime_factor(alpha, g, c) for g in range(1, 30)]).max(0)
    assert (gain >= (1 + alpha) / (1 + c) - 1e-12).all()
    assert (gain[~theory.pays(alpha, c)] <= 1).all()


def test_best_gamma_at_the_ends():
    assert theory.best_gamma(0.0, 0.0, 10) == 0 and theory.best_gamma(0.3, 0.3, 10) == 0
    assert theory.best_gamma(0.9, 0.0, 10) == theory.best_gamma(1.0, 0.5, 10) == 10
    assert theory.best_gamma(0.9, 0.1, 0) == 0
    grid = theory.best_gamma(np.array([[0.2], [0.8]]), np.array([0.01, 0.1, 0.9]), 20)
    assert grid.tolist() == [[2, 1, 0], [14, 6, 0]]


def test_oracle_bound_and_the_sixty_percent_of_section_3_5():
    assert theory.oracle_bound(0.8) == pytest.approx(theory.expected_tokens(0.8, 400))
    gains = []
    for alpha in np.linspace(0.5, 0.9, 9):
        for c in (0.01, 0.02, 0.05, 0.1):
            oracle = theory.oracle_bound(alpha) / (1 + c * alpha / (1 - alpha))  # drafts only what is accepted
            gains.append(oracle / theory.walltime_factor(alpha, int(theory.best_gamma(alpha, c, 200)), c))
    assert 1.5 < max(gains) < 1.6 and min(gains) > 1


def test_acceptance_and_divergence_identities():
    p, q = distributions(50, 7)
    overlap = np.minimum(p, q).sum(-1)
    np.testing.assert_allclose(theory.acceptance_rate(p, q), overlap)
    np.testing.assert_allclose(theory.d_lk(p, q), 1 - overlap, atol=1e-12)  # lemma 3.3
    np.testing.assert_allclose(theory.d_lk(p, q), np.abs(p - (p + q) / 2).sum(-1))  # definition 3.2
    np.testing.assert_array_equal(theory.d_lk(p, q), theory.d_lk(q, p))  # corollary 3.4
    assert (theory.d_lk(p, p) == 0).all() and theory.d_lk([1.0, 0.0], [0.0, 1.0]) == 1
    one_hot = np.eye(7)[[2]]
    np.testing.assert_allclose(theory.acceptance_rate(p, one_hot), p[:, 2])


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.1])
def test_lenience(lenience):
    p, q = distributions(50, 7, sharpness=0.3)
    rate = theory.lenient_acceptance_rate(p, q, lenience)
    by_ratio = (q * np.minimum(1, p / (lenience * q))).sum(-1)  # E over q of the acceptance, A.5
    np.testing.assert_allclose(rate, by_ratio, rtol=1e-12)
    assert (rate >= theory.acceptance_rate(p, q) - 1e-12).all() and (rate <= 1 + 1e-12).all()


def simulated_tokens(rng, alphas, rounds):
    """Tokens of each round, token by token: stop at the first refusal, one more from the target."""
    accepted = rng.random((rounds, len(alphas))) < alphas
    return 1 + np.cumprod(accepted, axis=1).sum(1)


def agrees(samples, expected, sigmas=4.5):
    return abs(samples.mean() - expected) < sigmas * samples.std() / len(samples) ** 0.5 + 1e-12


@pytest.mark.parametrize("gamma,alpha", [(1, 0.3), (4, 0.75), (8, 0.95), (0, 0.5), (5, 1.0)])
def test_simulated_rounds(gamma, alpha):
    rng = np.random.default_rng(RNG_SEED)
    samples = simulated_tokens(rng, np.full(gamma, alpha), 200_000)
    assert agrees(samples, theory.expected_tokens(alpha, gamma))
    varied = np.linspace(0.9, 0.2, gamma)
    assert agrees(simulated_tokens(rng, varied, 200_000) - 1, theory.expected_accepted_length(varied))


def test_simulated_speculative_sampling():
    """The accept test of algorithm 1 on drawn tokens, strict and lenient."""
    rng, n = np.random.default_rng(RNG_SEED), 200_000
    (p,), (q,) = distributions(1, 5)
    x, r = rng.choice(5, n, p=q), rng.random(n)
    assert agrees(r < p[x] / q[x], theory.acceptance_rate(p, q))
    for lenience in (0.5, 0.1):
        assert agrees(r < p[x] / (lenience * q[x]), theory.lenient_acceptance_rate(p, q, lenience))


def test_simulated_coupling_and_its_bound():
    rng, n = np.random.default_rng(RNG_SEED), 200_000
    p, q = distributions(20, 5, sharpness=0.5)
    p[0], q[0] = [0.5, 0.5, 0, 0, 0], [0, 0.5, 0.5, 0, 0]
    rate = theory.coupled_acceptance_rate(p, q)
    with np.errstate(divide="ignore"):
        noise = rng.gumbel(size=(n, 5))
        for i in range(3):
            same = np.argmax(np.log(p[i]) + noise, -1) == np.argmax(np.log(q[i]) + noise, -1)
            assert agrees(same, rate[i])
    tv = theory.d_lk(p, q)
    assert (theory.coupled_acceptance_bound(tv) <= rate + 1e-12).all()
    assert (rate <= theory.acceptance_rate(p, q) + 1e-12).all()  # no coupling beats the overlap
    assert rate[0] == pytest.approx(1 / 3) == theory.coupled_acceptance_bound(0.5)  # the bound is reached
    np.testing.assert_allclose(theory.coupled_acceptance_rate(p, p), 1)


def test_tree_of_one_branch_is_a_chain():
    alphas = np.array([0.9, 0.5, 0.7])
    assert theory.tree_expected_tokens(alphas, [-1, 0, 1]) == pytest.approx(1 + theory.expected_accepted_length(alphas))
    assert theory.tree_expected_tokens(np.full(6, 0.8), range(-1, 5)) == pytest.approx(theory.expected_tokens(0.8, 6))
    assert theory.tree_expected_tokens(np.zeros((2, 0)), []).tolist() == [1, 1]


def test_simulated_tree():
    """Two children of the root, two below the first, one below the second; walked as a verifier walks it."""
    parents, acceptance = [-1, -1, 0, 0, 1], np.array([0.6, 0.25, 0.5, 0.2, 0.9])
    rng, n = np.random.default_rng(RNG_SEED), 200_000
    u = rng.random((n, 2))
    first = np.digitize(u[:, 0], [0.6, 0.85])  # node 0, node 1, neither
    second = np.where(first == 0, u[:, 1] < 0.7, (first == 1) & (u[:, 1] < 0.9))
    assert agrees(1 + (first < 2) + second, theory.tree_expected_tokens(acceptance, parents))


def test_trees_and_gamma_are_checked():
    with pytest.raises(ValueError, match=r"parents\[1\]"):
        theory.tree_expected_tokens([0.5, 0.5], [-1, 1])
    with pytest.raises(ValueError, match="2 nodes, parents 1"):
        theory.tree_expected_tokens([0.5, 0.5], [-1])
    with pytest.raises(ValueError, match="gamma must be >= 0"):
        theory.expected_tokens(0.5, -1)


def test_accepted_length_is_a_loss():
    """Its gradient is exact, also at alpha 0 and 1 where a quotient form would give NaN; descent raises alpha."""
    alphas = jnp.array([0.8, 0.0, 0.5, 1.0])
    gradient = jax.grad(theory.expected_accepted_length)(alphas)
    np.testing.assert_allclose(gradient, [1, 0.8 * (1 + 0.5 + 0.5), 0, 0], rtol=1e-6)
    assert jax.grad(theory.expected_tokens)(1.0, 4) == 10 and jax.grad(theory.expected_tokens)(0.0, 4) == 1

    p = jax.nn.softmax(jax.random.normal(jax.random.key(0), (4, 6)))

    def loss(logits):
        return -theory.expected_accepted_length(theory.acceptance_rate(p, jax.nn.softmax(logits)))

    @jax.jit
    def descend(logits):
        return jax.lax.fori_loop(0, 300, lambda _, x: x - 0.3 * jax.grad(loss)(x), logits)

    start = jnp.zeros((4, 6))
    assert loss(descend(start)) < min(loss(start) - 0.5, -3.7)  # of at most 4


def test_jax_and_numpy_agree_under_jit():
    p, q = (x.astype(np.float32) for x in distributions(6, 5))
    for function in (theory.acceptance_rate, theory.d_lk, theory.coupled_acceptance_rate):
        jitted = jax.jit(function)(p, q)
        assert jitted.dtype == jnp.float32 and isinstance(function(p, q), np.ndarray)
        np.testing.assert_allclose(jitted, function(p, q), rtol=1e-5, atol=1e-7)
    alpha, c = p[:, 0], q[:, 0]
    jitted = jax.jit(lambda a, c: (theory.walltime_factor(a, 3, c), theory.best_gamma(a, c, 9)))(alpha, c)
    np.testing.assert_allclose(jitted[0], theory.walltime_factor(alpha, 3, c), rtol=1e-6)
    np.testing.assert_array_equal(jitted[1], theory.best_gamma(alpha, c, 9))
    tree = jax.jit(lambda a: theory.tree_expected_tokens(a, (-1, 0, 0, 1, 2)))(p)
    np.testing.assert_allclose(tree, theory.tree_expected_tokens(p, (-1, 0, 0, 1, 2)), rtol=1e-6)
