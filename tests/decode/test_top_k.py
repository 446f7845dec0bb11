"""The largest numbers of wide rows, found in two stages, are those of one stage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from specjax.decode import likeliest
from specjax.decode.likeliest import BLOCK, top_k


@pytest.mark.parametrize("size", [4 * BLOCK, 5 * BLOCK + 7])
@pytest.mark.parametrize("kind", ["random", "tied", "mostly impossible"])
def test_two_stages_give_what_one_gives(size, kind):
    """Among equal numbers the lowest index comes first, also across blocks."""
    x = np.random.default_rng(0).normal(size=(2, 3, size)).astype(np.float32)
    if kind == "tied":
        x = np.round(x)
    if kind == "mostly impossible":
        x[..., np.arange(size) % 2000 != 3] = -np.inf
    for found, expected in zip(top_k(jnp.asarray(x), 9), lax.top_k(jnp.asarray(x), 9), strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("merged", [False, True])
def test_numbers_that_are_none_and_zeros_below_zero_have_their_places(monkeypatch, merged):
    monkeypatch.setattr(likeliest.tuning, "merges_lists", lambda k: merged)
    values, places = top_k(jnp.array([jnp.nan, -0.0, 0.0, -jnp.inf, 1.0]), 3)
    assert values.tolist() == [1.0, 0.0, 0.0] and places.tolist() == [4, 1, 2]


def test_the_largest_of_none_are_none_on_every_device(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert likeliest.tuning.merges_lists(16) and not likeliest.tuning.merges_lists(17)
    values, places = top_k(jnp.ones((2, 5)), 0)
    assert values.shape == places.shape == (2, 0)


@pytest.mark.parametrize("count", [1, 7, 10, 16])
def test_merged_lists_give_what_sorting_gives(monkeypatch, count):
    """Of random numbers, of tied ones and of rows with fewer finite numbers than are asked for."""
    monkeypatch.setattr(likeliest.tuning, "merges_lists", lambda k: True)
    x = np.random.default_rng(0).normal(size=(3, 2, 333)).astype(np.float32)
    x[1] = np.round(x[1])
    x[2, :, np.arange(333) % 50 != 3] = -np.inf
    for found, expected in zip(top_k(jnp.asarray(x), count), lax.top_k(jnp.asarray(x), count), strict=True):
        assert np.array_equal(found, expected)
