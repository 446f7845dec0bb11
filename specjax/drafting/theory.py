"""The theory of speculative decoding in closed form: tokens a round, walltime, operations, acceptance.

"Leviathan" is Leviathan, Kalman and Matias, *Fast Inference from Transformers via Speculative Decoding* (ICML 2023).
``alpha`` is the probability that a drafted token is accepted. Unless a function says otherwise, alpha is the same at
all positions, and acceptances are independent. ``gamma`` is the number of drafted tokens, called K elsewhere. ``c`` is
the time of a draft step over the time of a target step.

Every function takes Python numbers, NumPy arrays or JAX arrays, works elementwise over leading axes, and keeps dtypes.
"""

import operator
from collections.abc import Sequence

import numpy as np


def expected_tokens(alpha, gamma: int):
    """Tokens that a round commits on average, (1 - alpha^(gamma+1)) / (1 - alpha). Leviathan eq. 1.

    The sum is computed as the polynomial 1 + alpha + ... + alpha^gamma. So alpha = 1 and gradients are no special case.

    Args:
      alpha: [...] in [0, 1].
      gamma: a Python integer >= 0.

    Returns:
      [...] in [1, gamma + 1].

    Raises:
      ValueError: gamma is negative.
    """
    gamma = operator.index(gamma)
    if gamma < 0:
        raise ValueError(f"gamma must be >= 0, got {gamma}")
    total = 1 + 0 * alpha  # has alpha's shape also if gamma is 0
    for _ in range(gamma):
        total = 1 + alpha * total
    return total


def walltime_factor(alpha, gamma: int, c):
    """Speedup over plain decoding if a call with gamma + 1 tokens takes as long as one with one. Leviathan theorem 3.8.

    Args:
      alpha: [...] in [0, 1].
      gamma: a Python integer >= 0.
      c: [...] >= 0.
    """
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def operations_factor(alpha, gamma: int, c_hat):
    """Arithmetic operations relative to plain decoding. Leviathan theorem 3.11.

    Args:
      alpha: [...] in [0, 1].
      gamma: a Python integer >= 0.
      c_hat: [...] >= 0, the draft's operations per token over the target's operations per token.
    """
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def pays(alpha, c):
    """Whether some gamma >= 1 is faster than plain decoding. Leviathan corollary 3.9.

    If some gamma is faster, gamma = 1 is faster too, by the factor (1 + alpha) / (1 + c).
    """
    return alpha > c


def best_gamma(alpha, c, max_gamma: int):
    """The gamma from 0 to max_gamma with the highest :func:`walltime_factor`. Leviathan section 3.5.

    Plain decoding, gamma = 0, is one of the choices. Of equally good choices the smallest is taken.

    Args:
      alpha, c: [...], broadcast together.
      max_gamma: a Python integer >= 0. If c is 0, nothing else limits gamma.

    Returns:
      Integers [...].
    """
    tokens = 1 + 0 * (alpha + c)
    factors = [tokens]
    for gamma in range(1, operator.index(max_gamma) + 1):
        tokens = 1 + alpha * tokens
        factors.append(tokens / (gamma * c + 1))
    xp = _namespace(tokens)
    return xp.argmax(xp.stack([xp.asarray(f) for f in factors]), axis=0)


def oracle_bound(alpha):
    """Tokens a round if an oracle chose gamma by the tokens that will be accepted: 1 / (1 - alpha). Leviathan 3.5.

    This is the limit of :func:`expected_tokens` as gamma grows.

    Args:
      alpha: [...] in [0, 1).
    """
    return 1 / (1 - alpha)


def acceptance_rate(p, q):
    """Probability that rejection sampling keeps a token drawn from q, sum min(p, q). Leviathan theorem 3.5.

    The mean of this probability over prefixes is alpha (corollary 3.6).

    Args:
      p, q: probabilities [..., V].

    Returns:
      [...] in [0, 1].
    """
    xp = _namespace(p, q)
    return xp.sum(xp.minimum(xp.asarray(p), xp.asarray(q)), axis=-1)


def d_lk(p, q):
    """The divergence 1 - sum min(p, q), which is the total variation distance. Leviathan definition 3.2, lemma 3.3.

    The sum is computed over |p - q| / 2, so it is exactly 0 if p = q.

    Args:
      p, q: probabilities [..., V].

    Returns:
      [...] in [0, 1].
    """
    xp = _namespace(p, q)
    return xp.sum(xp.abs(xp.asarray(p) - xp.asarray(q)), axis=-1) / 2


def lenient_acceptance_rate(p, q, lenience):
    """Probability of acceptance if q is multiplied by ``lenience`` before the test: sum min(p / l, q).

    Leviathan appendix A.5. Below 1 the test is lossy: a token may come out up to 1 / lenience times too often.

    Args:
      p, q: probabilities [..., V].
      lenience: l, in (0, 1]. At 1 the result is :func:`acceptance_rate`.
    """
    xp = _namespace(p, q)
    return acceptance_rate(xp.asarray(p) / lenience, q)


def coupled_acceptance_rate(p, q):
    """Probability that p and q, sampled with the same Gumbel noise, give the same token. O(V^2) in memory.

    The probability is the sum over x of 1 / sum_y max(p_y / p_x, q_y / q_x). Sampling with Gumbel noise is a race of
    exponential clocks, one for each token. Token x wins the races of both p and q if the clock of every other token y
    outlasts the clock of x by the larger of the two ratios.

    Args:
      p, q: probabilities [..., V].

    Returns:
      [...] in [0, 1].
    """
    xp = _namespace(p, q)
    p, q = xp.asarray(p), xp.asarray(q)
    both = (p > 0) & (q > 0)
    ratios = [xp.where(both, x, 1)[..., :, None] for x in (p, q)]
    slower = xp.sum(xp.maximum(p[..., None, :] / ratios[0], q[..., None, :] / ratios[1]), axis=-1)
    return xp.sum(xp.where(both, 1 / slower, 0), axis=-1)


def coupled_acceptance_bound(tv):
    """The least :func:`coupled_acceptance_rate` at a total variation distance: (1 - tv) / (1 + tv).

    Source: Daliri, Musco and Suresh, *Coupling without Communication and Drafter-Invariant Speculative Decoding*
      (2024).

    Args:
      tv: [...] in [0, 1], the total variation distance of p and q.
    """
    return (1 - tv) / (1 + tv)


def expected_accepted_length(alphas):
    """Drafted tokens that a round accepts on average, without the bonus: the sum over k of alpha_1 ... alpha_k.

    Positions may differ. So the result is exact if each alpha is the :func:`acceptance_rate` of its position, given
    that the positions before were accepted. The function is differentiable also where an alpha is 0. Its negative is a
    loss that trains a draft on the number of accepted tokens, as section 6 of Leviathan suggests for alpha.

    Args:
      alphas: [..., K] acceptance at each position, in [0, 1].

    Returns:
      [...] in [0, K].
    """
    xp = _namespace(alphas)
    return xp.sum(xp.cumprod(xp.asarray(alphas), axis=-1), axis=-1)


def tree_expected_tokens(acceptance, parents: Sequence[int]):
    """Tokens that a round with a token tree commits on average: 1 + the sum over all nodes of the chance to be reached.

    A node is reached if the node and all nodes above it are accepted. Siblings exclude each other, so their chances
    should sum to at most 1. If the chances depend only on the depth, or on the rank among siblings (Chen et al. 2024,
    *Sequoia*, section 3), make an array of nodes of them first: ``acceptance[depth]``.

    Args:
      acceptance: [..., N], the probability that each node is the accepted child, given that its parent was accepted.
      parents: N Python integers, the parent of each node, with parents[i] < i. -1 is the last committed token.

    Returns:
      [...] in [1, 1 + depth].

    Raises:
      ValueError: a parent does not come before its node, or the lengths differ.
    """
    xp = _namespace(acceptance)
    acceptance = xp.asarray(acceptance)
    if acceptance.shape[-1] != len(parents):
        raise ValueError(
            f"acceptance has {acceptance.shape[-1]} nodes, parents {len(parents)}: both need one value for each node"
        )
    reach: list = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"parents[{node}] must be in [-1, {node}), got {parent}")
        reach.append(acceptance[..., node] * (1 if parent < 0 else reach[parent]))
    return sum(reach, start=1 + 0 * xp.sum(acceptance, axis=-1))


def _namespace(*arrays):
    """jax.numpy if any argument is a JAX array, else NumPy. So plain arithmetic does not import JAX."""
    for array in arrays:
        if not isinstance(array, np.ndarray | np.generic) and hasattr(array, "__array_namespace__"):
            return array.__array_namespace__()
    return np
