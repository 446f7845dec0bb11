"""Several proposals for one position."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import ratio
from tables import each_table, tables

from specjax.decode.types import Draft
from specjax.verify import siblings as multi
from specjax.verify import without_replacement


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
def test_siblings_leave_the_targets_law(seed, size, replace):
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


def test_siblings_of_different_drafts_keep_the_law_beside_padding():
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
