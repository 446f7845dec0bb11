"""Traversal verification by enumeration, on chains and trees, and over rounds that must not share a draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import every_draft, outcomes
from tables import KEYS, ONES, ROWS, SIZE, chisquare, drafts, judge, pad, power_law, sample, tables
from tree_enumeration import (
    SHAPES,
    committed_law,
    every_tree,
    expected_tokens,
    rejection_law,
    traversal_law,
    walk,
)

import specjax
from specjax.decode import draft_shape, random
from specjax.decode.draft_shape import FixedTreeShape
from specjax.drafters import FixedTree, TreeModel
from specjax.drafting.topology import from_widths
from specjax.testing import table_lm
from specjax.verify import Block, Rejection, Traversal
from specjax.verify.traversal import first_on_the_walk

QUICK = ("chain of 3", "two chains of 2", "three children, uneven")
each_shape = pytest.mark.parametrize("above", [
    pytest.param(above, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, above in SHAPES.items()
])  # fmt: skip
each_way = pytest.mark.parametrize("replace", [False, True], ids=["not_replaced", "replaced"])


@each_shape
@each_way
def test_traversal_commits_with_the_targets_law(above, replace):
    """Whatever a round commits, followed by plain sampling, has the target's law: checked on all K + 1 tokens."""
    for seed in range(6):
        p, q = tables(seed)
        weight, p_rows, draft = every_tree(p, q, above, replace)
        assert weight.sum() == pytest.approx(1)
        want = power_law(p, 0, int(draft.shape.depth.max()) + 1)
        np.testing.assert_allclose(committed_law(traversal_law, p, weight, p_rows, draft), want, atol=2e-6)
        np.testing.assert_allclose(committed_law(rejection_law, p, weight, p_rows, draft), want, atol=2e-6)


@each_shape
def test_traversal_ends_below_each_stop_token_of_a_tree(above):
    """Nothing follows a drafted 1. Garbage past the end must not matter."""
    for seed in range(4):
        p, q = tables(seed)
        weight, p_rows, draft = every_tree(p, q, above)
        cut = draft.valid & ~draft.shape.below(jnp.pad(draft.tokens == 1, ((0, 0), (1, 0))))
        past = jnp.pad(~cut, ((0, 0), (1, 0)))[..., None]
        for garbage in (jnp.nan, 0.0):
            ragged = draft._replace(valid=cut, probs=jnp.where(cut[..., None], draft.probs, garbage))
            law = committed_law(traversal_law, p, weight, jnp.where(past, garbage, p_rows), ragged)
            np.testing.assert_allclose(law, power_law(p, 0, int(draft.shape.depth.max()) + 1), atol=2e-6)


@each_shape
@each_way
def test_traversal_keeps_at_least_as_many_as_rejection(above, replace):
    """On 20 pairs of tables. With pytest -s this prints the row of the table in docs/drafters.md."""
    arguments = [every_tree(*tables(seed), above, replace) for seed in range(20)]
    kept = np.array([[expected_tokens(law, *a) for law in (rejection_law, traversal_law)] for a in arguments])
    gains = kept[:, 1] - kept[:, 0]
    print(f"\n| {kept[:, 0].mean():.3f} | {kept[:, 1].mean():.3f} | {gains.min():.4f} | {gains.max():.4f} |")
    assert gains.min() > -1e-6
    assert gains.max() > 1e-3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_traversal_on_a_chain_keeps_as_many_as_block(size):
    for seed in range(20):
        p, q = tables(seed)
        block = outcomes(Block(), *every_draft(p, q, size))[1]
        assert expected_tokens(traversal_law, *every_tree(p, q, range(size))) == pytest.approx(block, abs=1e-6)


def test_traversal_on_a_chain_is_block_verdict_by_verdict():
    p, q = (pad(x) for x in tables(4))
    drawn = drafts(Block(), q, 0 * ONES, ONES, KEYS)
    ragged = drawn._replace(valid=jnp.arange(SIZE) < (jnp.arange(ROWS) % (SIZE + 1))[:, None])
    rows = p[jnp.concatenate([0 * ONES[:, None], drawn.tokens], 1)]
    one, other = (jax.device_get(judge(v, rows, ragged, KEYS, ONES)) for v in (Traversal(), Block()))
    assert np.mean((one[0] != other[0]) | (one[1] != other[1])) < 1e-3  # rounding
    assert len(np.unique(one[0])) == SIZE + 1


def test_the_first_node_that_passes_on_the_walk_is_found():
    """Against the walk by hand, on random trees and on the chain."""
    rng = np.random.default_rng(0)
    parents = rng.integers(0, np.arange(1, 10), (300, 9))
    passes = rng.random(parents.shape) < 0.2
    fixed = (0, 0, 1, 2, 2, 3, 5, 0, 8)
    for shape in (draft_shape.grown(jnp.asarray(parents, jnp.int32)), FixedTreeShape(fixed), draft_shape.CHAIN):
        node, depth = (np.asarray(x) for x in first_on_the_walk(shape, jnp.asarray(passes)))
        depths = np.broadcast_to(shape.depths(9), (300, 10))
        for row, mine in enumerate(np.asarray(draft_shape.parents_of(shape, 300, 9))):
            want = next(i for i in walk(mine.tolist()) if i == 0 or passes[row, i - 1])
            assert (node[row], depth[row]) == (want, depths[row, want])


class SharedNoise(Traversal):
    """Traversal over nodes that share the noise of their position: wrong, and here to be found out."""

    def draft_keys(self, keys, lengths):
        return random.shared(Traversal.draft_keys(self, keys, lengths))


class OneDraftKey(Traversal):
    """Traversal without the round's start in its draft keys."""

    def draft_keys(self, keys, lengths):
        return random.Apart(Rejection().draft_keys(keys, lengths))


class OneAcceptKey(Traversal):
    """The same for its uniforms."""

    def verify(self, p, draft, keys, lengths):
        verdict = Traversal.verify(self, p, draft, keys, jnp.zeros_like(lengths))
        return verdict._replace(token=Traversal.verify(self, p, draft, keys, lengths).token)


FAULTS = [pytest.param(v, marks=pytest.mark.slow) for v in (OneDraftKey(), OneAcceptKey())]


@pytest.mark.parametrize("verifier", [Traversal(), *FAULTS], ids=lambda v: type(v).__name__)
def test_traversal_draws_anew_in_every_round(verifier):
    """Rounds that share a draft key or a uniform are far off the law, so this test would see them."""
    pvalues = [
        chisquare(sample(verifier, size, *tables(seed), 4, seed=seed).ravel(), power_law(tables(seed)[0], 0, 4).ravel())
        for size, seed in ((2, 0), (3, 2))
    ]
    assert min(pvalues) > 1e-4 if type(verifier) is Traversal else min(pvalues) < 1e-8


def test_no_two_children_of_one_depth_share_a_key_whatever_their_parents_and_ranks():
    keys = random.at_children(random.Apart(random.request_keys([5])), jnp.array([9]), 3)
    words = [jax.random.key_data(random.siblings(keys, jnp.full((1, 3), rank))) for rank in range(3)]
    assert len(np.unique(np.reshape(words, (9, 2)), axis=0)) == 9


@pytest.mark.parametrize("verifier, replace", [
    pytest.param(Traversal(), False, id="not_replaced"),
    pytest.param(Traversal(), True, id="replaced", marks=pytest.mark.slow),
    pytest.param(SharedNoise(), False, id="shared noise", marks=pytest.mark.slow),
])  # fmt: skip
def test_nodes_with_different_parents_are_drawn_independently(verifier, replace):
    """Four tokens of ``generate`` over trees two levels deep. Shared noise leads far off the law."""
    p, q = tables(0)
    tree = FixedTree(from_widths((2, 2)), with_replacement=replace)
    result = specjax.generate(
        table_lm(p), [[0]] * 6000, drafter=TreeModel(table_lm(q), tree, prefill_chunk=4), verifier=verifier,
        num_speculative_tokens=2, max_new_tokens=4, temperature=1.0,
    )  # fmt: skip
    counts = np.histogramdd(np.array(result.tokens), bins=[np.arange(4)] * 4)[0]
    pvalue = chisquare(counts.ravel(), power_law(p, 0, 4).ravel())
    assert pvalue > 1e-4 if type(verifier) is Traversal else pvalue < 1e-8
