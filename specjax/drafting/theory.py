"""What speculative decoding should give, in closed form: tokens a round, walltime, operations, acceptance.

"Leviathan" is Leviathan, Kalman and Matias, *Fast Inference from Transformers via Speculative Decoding* (ICML 2023).
``alpha`` is the chance that a drafted token is accepted, taken as equal and independent over positions unless said
otherwise; ``gamma`` (elsewhere K) counts drafted tokens; ``c`` is the time of a draft step over that of a target step.

Every function works on Python numbers, NumPy and JAX arrays alike, elementwise over leading axes, in the dtype given.
"""

import operator
from collections.abc import Sequence

import numpy as np


def expected_tokens(alpha, gamma: int):
    """Tokens that a round commits on average, (1 - alpha^(gamma+1)) / (1 - alpha). Leviathan eq. 1.

    Summed as the polynomial 1 + alpha + ... + alpha^gamma, so alpha = 1 and gradients need no special case.

    Args:
      alpha: [...] in [0, 1].
      gamma: a Python integer >= 0.

    Returns:
      [...] in [1, gamma + 1].

    Raises:
      ValueError: if gamma is negative.
    """
    gamma = operator.index(gamma)
    if gamma < 0:
        raise ValueError(f"gamma must be >= 0, got {gamma}")
    total = 1 + 0 * alpha  # of alpha's shape even at gamma = 0
    for _ in range(gamma):
        total = 1 + alpha * total
    return total


def walltime_factor(alpha, gamma: int, c):
    """Speedup over plain decoding when verifying gamma + 1 tokens takes the time of one. Leviathan theorem 3.8.

    Args:
      alpha: [...]; gamma: as in :func:`expected_tokens`; c: [...] >= 0.
    """
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def operations_factor(alpha, gamma: int, c_hat):
    """Arithmetic operations relative to plain decoding; c_hat is the draft's per token over the target's.

    Leviathan theorem 3.11. Arguments as in :func:`walltime_factor`.
    """
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def pays(alpha, c):
    """Whether some gamma >= 1 is faster than plain decoding; then gamma = 1 already is, by (1 + alpha) / (1 + c).

    Leviathan corollary 3.9.
    """
    return alpha > c


def best_gamma(alpha, c, max_gamma: int):
    """The gamma in 0..max_gamma with the highest :func:`walltime_factor`, the smallest among equals.

    Leviathan section 3.5, with plain decoding (0) as one of the choices.

    Args:
      alpha, c: [...], broadcast together.
      max_gamma: a Python integer >= 0; with c = 0 there is no other limit.

    Returns:
      integers [...].
    """
    tokens = 1 + 0 * (alpha + c)
    factors = [tokens]
    for gamma in range(1, operator.index(max_gamma) + 1):
        tokens = 1 + alpha * tokens
        factors.append(tokens / (gamma * c + 1))
    xp = _namespace(tokens)
    return xp.argmax(xp.stack([xp.asarray(f) for f in factors]), axis=0)


def oracle_bound(alpha):
    """Tokens a round if gamma could be chosen knowing what will be accepted: 1 / (1 - alpha). Leviathan section 3.5.

    alpha: [...] in [0, 1); the limit of :func:`expected_tokens` as gamma grows.
    """
    return 1 / (1 - alpha)


def acceptance_rate(p, q):
    """Chance that rejection sampling keeps a token of q, sum min(p, q). Leviathan theorem 3.5.

    Its mean over prefixes is alpha (corollary 3.6). Args: p, q: probabilities [..., V]. Returns [...].
    """
    xp = _namespace(p, q)
    return xp.sum(xp.minimum(xp.asarray(p), xp.asarray(q)), axis=-1)


def d_lk(p, q):
    """The divergence 1 - sum min(p, q), which is the total variation distance. Leviathan definition 3.2, lemma 3.3.

    Summed as |p - q| / 2, exact where p = q. Args: p, q: probabilities [..., V]. Returns [...] in [0, 1].
    """
    xp = _namespace(p, q)
    return xp.sum(xp.abs(xp.asarray(p) - xp.asarray(q)), axis=-1) / 2


def lenient_acceptance_rate(p, q, lenience):
    """Chance of acceptance when q is multiplied by ``lenience`` before the test: sum min(p / l, q).

    Leviathan appendix A.5. Lossy below 1: a token may then come out up to 1 / lenience times too often.

    Args:
      p, q: probabilities [..., V].
      lenience: in (0, 1]; 1 is :func:`acceptance_rate`.
    """
    xp = _namespace(p, q)
    return acceptance_rate(xp.asarray(p) / lenience, q)


def coupled_acceptance_rate(p, q):
    """Chance that p and q sampled with the same Gumbel noise give the same token. O(V^2) in memory.

    The sum over x of 1 / sum_y max(p_y / p_x, q_y / q_x): x wins both exponential races when each other clock y
    outlasts its own by the larger of the two ratios. Args: p, q: probabilities [..., V]. Returns [...].
    """
    xp = _namespace(p, q)
    p, q = xp.asarray(p), xp.asarray(q)
    both = (p > 0) & (q > 0)
    ratios = [xp.where(both, x, 1)[..., :, None] for x in (p, q)]
    slower = xp.sum(xp.maximum(p[..., None, :] / ratios[0], q[..., None, :] / ratios[1]), axis=-1)
    return xp.sum(xp.where(both, 1 / slower, 0), axis=-1)


def coupled_acceptance_bound(tv):
    """Least :func:`coupled_acceptance_rate` at total variation distance tv: (1 - tv) / (1 + tv).

    Daliri, Musco and Suresh, *Coupling without Communication and Drafter-Invariant Speculative Decoding* (2024).
    Args: tv: [...] in [0, 1].
    """
    return (1 - tv) / (1 + tv)


def expected_accepted_length(alphas):
    """Drafted tokens accepted a round, bonus not counted: the sum over k of alpha_1 ... alpha_k.

    No position need resemble another, so with :func:`acceptance_rate` of each position (given that those before were
    accepted) this is exact. Differentiable also where an alpha is 0: its negative is a loss for training a draft on
    what decoding gains, as section 6 of Leviathan suggests for alpha.

    Args:
      alphas: [..., K] acceptance by position, in [0, 1].

    Returns:
      [...] in [0, K].
    """
    xp = _namespace(alphas)
    return xp.sum(xp.cumprod(xp.asarray(alphas), axis=-1), axis=-1)


def tree_expected_tokens(acceptance, parents: Sequence[int]):
    """Tokens that a round over a tree of drafts commits on average: 1 + the sum over nodes of the chance to reach it.

    A node is reached when it and all nodes above it are accepted. Siblings exclude each other, so theirs should add
    up to at most 1. With values that depend only on the depth, or on the rank among siblings (Chen et al. 2024,
    *Sequoia*, section 3), index them by node first: ``acceptance[depth]``.

    Args:
      acceptance: [..., N] chance that the node is the accepted child, given that its parent was accepted.
      parents: N Python integers, parents[i] < i; -1 is the last committed token.

    Returns:
      [...] in [1, 1 + depth].

    Raises:
      ValueError: if a parent does not come before its node, or the lengths differ.
    """
    xp = _namespace(acceptance)
    acceptance = xp.asarray(acceptance)
    if acceptance.shape[-1] != len(parents):
        raise ValueError(f"acceptance has {acceptance.shape[-1]} nodes, parents {len(parents)}")
    reach: list = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"parents[{node}] must be in [-1, {node}), got {parent}")
        reach.append(acceptance[..., node] * (1 if parent < 0 else reach[parent]))
    return sum(reach, start=1 + 0 * xp.sum(acceptance, axis=-1))


def _namespace(*arrays):
    """jax.numpy if any argument is a JAX array, else NumPy: no import of JAX for plain arithmetic."""
    for array in arrays:
        if not isinstance(array, np.ndarray | np.generic) and hasattr(array, "__array_namespace__"):
            return array.__array_namespace__()
    return np
