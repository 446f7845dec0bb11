"""A paged cache gives the same entries and results as a contiguous one, to the last bit, wherever the pages lie."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import testing
from specjax.models import cache as kv

ROWS, CAPACITY, PAGES = 3, 192, 12
TOKENS = jax.random.randint(jax.random.key(0), (ROWS, 150), 0, 32)
LENGTHS = jnp.array([130, 0, 61], jnp.int32)


def caches(lm):
    """An empty contiguous cache, and a paged one of scattered pages with finite rubbish in every slot."""
    whole = lm.alloc_cache(ROWS, CAPACITY)
    paged = kv.paged(whole, ROWS, PAGES)
    table = 1 + np.random.default_rng(0).permutation(PAGES - 1)[: ROWS * 3].reshape(ROWS, 3)

    def rubbish(x):
        return jnp.full_like(x, 3)

    keys, values = jax.tree.map(rubbish, (paged.keys, paged.values))
    return whole, paged.replace(keys=keys, values=values, table=jnp.asarray(table, jnp.int32))


def fed(lm, cache):
    """The cache after each row's first LENGTHS tokens. The block is longer, so stale entries lie behind them."""
    cache = lm(TOKENS, cache, with_logits=False).cache
    return kv.with_lengths(cache, LENGTHS)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_results_and_entries_are_those_of_the_contiguous_cache(kv_dtype):
    lm = dataclasses.replace(testing.tiny_lm(vocab_size=32), kv_dtype=kv_dtype)
    block = TOKENS[:, 7:12]
    outs = [jax.jit(lm.__call__)(block, fed(lm, cache)) for cache in caches(lm)]
    np.testing.assert_array_equal(outs[0].logits, outs[1].logits)
    for whole, pool in zip(outs[0].cache.keys, outs[1].cache.keys, strict=True):
        rows = kv.by_rows(pool, outs[1].cache.table)
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(rows), strict=True):
            for row, length in enumerate(LENGTHS.tolist()):
                np.testing.assert_array_equal(a[row, :, : length + 5], b[row, :, : length + 5])


def test_entries_are_moved_within_and_across_pages():
    lm = testing.tiny_lm(vocab_size=32)
    slots = jnp.array([[129, 64, 63], [0, 1, 5], [60, 2, 59]], jnp.int32)
    moved = [kv.move(fed(lm, cache), slots, jnp.array([126, 3, 63], jnp.int32)) for cache in caches(lm)]
    rows = kv.by_rows(moved[1].keys[1], moved[1].table)
    for row, end in enumerate((129, 6, 66)):
        np.testing.assert_array_equal(moved[0].keys[1][row, :, :end], rows[row, :, :end])


def test_what_lies_past_the_table_goes_to_the_null_page():
    lm = testing.tiny_lm(vocab_size=32)
    paged = caches(lm)[1]
    full = kv.with_lengths(paged, jnp.full(ROWS, CAPACITY - 2, jnp.int32))
    after = lm(TOKENS[:, :6], full, with_logits=False).cache
    changed = np.asarray(jnp.any(after.keys[0] != full.keys[0], axis=(1, 2, 3)))
    assert set(np.flatnonzero(changed)) == {0, *np.asarray(paged.table)[:, -1].tolist()}


def test_a_row_of_null_pages_writes_into_no_other_row():
    lm = testing.tiny_lm(vocab_size=32)
    paged = caches(lm)[1]
    idle = paged.replace(table=paged.table.at[1].set(0))
    after = lm(TOKENS[:, :6], kv.with_lengths(idle, LENGTHS), with_logits=False).cache
    for page in np.asarray(paged.table)[1]:
        np.testing.assert_array_equal(after.keys[0][page], idle.keys[0][page])


def test_a_value_that_is_not_finite_becomes_zero_and_its_key_nan():
    keys, values = kv.finite_values(jnp.ones((1, 3)), jnp.array([[jnp.inf, 2.0, jnp.nan]]))
    assert jnp.isnan(keys).tolist() == [[True, False, True]] and values.tolist() == [[0.0, 2.0, 0.0]]
