"""Lossy verifiers: what they keep and what they cost."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import LAWS, every_draft, joint_law, outcomes
from tables import KEYS, ROWS, chisquare, each_table, pad, power_law, sample, table_round, tables

import specjax
from specjax.decode import random
from specjax.decode.types import Draft
from specjax.testing import table_lm
from specjax.verify import VERIFIERS, Lenient, LenientGreedy, Rejection, TypicalAcceptance


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    return 0.5 * np.abs(a - b).sum()


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


def test_lenience_1_is_rejection_token_for_token():
    """Of a sampled draft; of point masses the laws are equal, which enumeration shows."""
    p, q = (pad(x) for x in tables(1))
    rows = (jnp.arange(ROWS) % 3, jnp.arange(ROWS) % 7, KEYS)
    exact, lenient = (table_round(v, 3, p, q, *rows) for v in (Rejection(), Lenient(1.0)))
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
