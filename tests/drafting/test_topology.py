"""Static tree shapes, and the best of them against all there are."""

import itertools

import numpy as np
import pytest

from specjax import generate
from specjax.drafters import PromptLookup, TreeModel
from specjax.drafting.topology import Topology, expected_length, from_choices, from_widths, sequoia
from specjax.measure import acceptance
from specjax.testing import table_lm


def test_widths():
    one = from_widths((3, 2, 1))
    assert one.parents == (0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9)
    assert one.depth == 3 and one.depths.tolist() == [0] + [1] * 3 + [2] * 6 + [3] * 6
    assert one.ranks.tolist() == [0, 0, 1, 2, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0]
    assert np.flatnonzero(one.ancestors[12]).tolist() == [0, 2, 6, 12]


def test_choices_say_the_same_in_any_order():
    paths = [path for depth in (1, 2, 3) for path in itertools.product(*map(range, (3, 2, 1)[:depth]))]
    assert from_choices(reversed(paths)) == from_widths((3, 2, 1))
    assert from_choices([(0,), (1,), (1, 0)]).parents == (0, 0, 2)


@pytest.mark.parametrize("depth, parents", [(1, (0, 0)), (2, (0, 0, 1, 1, 2, 2)), (4, (0, 0, 1, 1, 2, 2, 3, 7))])
def test_a_tree_is_cut_or_carried_on_to_a_depth(depth, parents):
    assert from_widths((2, 2)).of_depth(depth).parents == parents


@pytest.mark.parametrize("make, value, match", [
    (from_widths, (), "widths"), (from_widths, (2, 0), "widths"), (from_widths, (1.5,), "widths"),
    (Topology, (), "parents"), (Topology, (1,), "parents"), (Topology, (0, 1, 0), "parents"),
    (from_choices, [(0,), (2,)], r"\(2,\) needs \(1,\)"), (from_choices, [(0,), (1, 0)], r"needs \(1,\)"),
    (from_choices, [(0,), (0,)], "once"), (from_choices, [()], "once"),
    (lambda table: sequoia(table, 3), [[0.8, 0.5]], "at most 1"), (lambda table: sequoia(table, 0), [[0.8]], "nodes"),
    (lambda table: sequoia(table, 3), [[0.0, 0.5]], "first child"), (lambda table: sequoia(table, 3), [0.5], "table"),
])  # fmt: skip
def test_what_is_no_tree_is_refused(make, value, match):
    with pytest.raises(ValueError, match=match):
        make(value)


def every_tree(levels: int, ranks: int, nodes: int):
    """All trees of exactly ``nodes`` nodes within a table, by their choices."""
    paths = [path for depth in range(1, levels + 1) for path in itertools.product(range(ranks), repeat=depth)]
    for chosen in itertools.combinations(paths, nodes):
        try:
            yield from_choices(chosen)
        except ValueError:  # a parent or a better sibling is missing
            pass


@pytest.mark.parametrize("seed, nodes", [(0, 1), (0, 3), (1, 4), (2, 5), (3, 5), (4, 6)])
def test_sequoia_is_the_best_of_all_trees(seed, nodes):
    table = np.random.default_rng(seed).dirichlet([2.0, 1.0, 1.0, 0.5], 3)[:, :2]  # not even falling with the rank
    best = max(expected_length(one, table) for one in every_tree(3, 2, nodes))
    found = sequoia(table, nodes)
    assert len(found.parents) == nodes
    assert expected_length(found, table) == pytest.approx(best)


def test_sequoia_leaves_out_what_earns_nothing():
    assert sequoia([[0.6, 0.0], [0.5, 0.0]], 9).parents == (0, 1)


def test_expected_length_of_a_chain_and_past_the_table():
    assert expected_length(from_widths((1, 1)), [[0.5], [0.4]]) == pytest.approx(0.5 + 0.2)
    assert expected_length(from_widths((2, 1, 1)), [[0.5], [0.4]]) == pytest.approx(0.5 + 0.2)


@pytest.mark.slow
def test_acceptance_by_rank_is_what_the_models_laws_say():
    """Greedy, the child of rank m is accepted where the draft's m-th best token is the target's best; sampled, the
    first child is accepted with probability sum min(p, q)."""
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.full(6, 0.5), 6) for _ in range(2))
    target, draft = table_lm(p), table_lm(q)
    prompts = [[i] for i in range(6)]
    options = dict(max_new_tokens=200, ignore_eos=True, seed=list(range(6)))
    found = acceptance.by_rank(target, prompts, TreeModel(draft, (1,)), 2, 3, temperature=1.0, **options)
    text = np.concatenate([[p, *t] for p, t in zip(
        range(6), generate(target, prompts, temperature=1.0, **options).tokens, strict=True)])  # fmt: skip
    share = np.bincount(text, minlength=6) / len(text)
    expected = np.sum(share * np.minimum(p, q).sum(1))
    assert abs(found[0, 0] - expected) < 0.06, (found, expected)
    assert (found.sum(1) <= 1).all() and (found[0] > 0).all()
    self_draft = acceptance.by_rank(target, prompts, TreeModel(target, (1,)), 3, 2, temperature=1.0, **options)
    assert np.array_equal(self_draft, [[1, 0]] * 3)
    second = q.copy()  # a draft whose second best is always the target's best
    best = p.argmax(1)
    second[np.arange(6), best] = 0.0
    second[np.arange(6), best] = 0.9 * second.max(1)
    greedy = acceptance.by_rank(target, prompts, TreeModel(table_lm(second), (1,)), 2, 3, **options)
    assert np.array_equal(greedy, [[0, 1, 0], [0, 0, 0]])
    with pytest.raises(ValueError, match="needs a drafter that grows trees, got PromptLookup"):
        acceptance.by_rank(target, prompts, PromptLookup())
