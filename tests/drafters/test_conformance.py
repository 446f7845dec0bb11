"""The conformance table: every drafter with every lossless verifier, under every sampling transform.

One batch holds all settings, ragged prompts included, and models of one shape share programs; so a line more in
DRAFTERS costs one compilation a verifier.
"""

import dataclasses
from functools import partial
from unittest import mock

import jax
import numpy as np
import pytest
from drafter_table import DRAFTERS, SELF, SHAPE, TARGET, TARGETS, pairs

from specjax import drafters, testing
from specjax.decode import prefill
from specjax.decode import round as rounds
from specjax.drafters import DraftModel, NoDraft, TreeModel
from specjax.generation.generate import prepare
from specjax.models import cache as kv
from specjax.models.lm import LM
from specjax.testing import Trial

HISTORY = {"jacobi", "twin, heuristic", "twin, entropy", "twin, cost model"}  # to whose proposals the past matters
HISTORY |= {d for d in DRAFTERS if "lookahead" in d}
MEMORYLESS = [d for d in DRAFTERS if d not in HISTORY]
VERIFIERS = testing.lossless_verifiers()
# By default every check with the drafters that differ most and each verifier with a sampled draft, and the joint law of
# most drafters whose exactness rests on an argument of their own; the rest is slow (pytest -m slow). Trees with
# replacement have their law by default in test_trees.py, where it costs little.
CORE = {("prompt lookup", "rejection"), ("tree", "rejection")} | {("noisy twin", v) for v in VERIFIERS}
ON_CHAINS_BLOCK = "traversal"  # on chains this is block, verdict by verdict (test_traversal.py)
CORE -= {("noisy twin", ON_CHAINS_BLOCK)}
SEEN = {"prompt lookup", "noisy twin"}
OWN_ARGUMENT = ("early exit", "jacobi", "cascade", "twin, confidence", "block head")
LAWS = CORE - {("noisy twin", "coupled")} | {(d, "rejection") for d in OWN_ARGUMENT}


TABLE = pairs(CORE)
BY_REJECTION = pairs({pair for pair in CORE if pair[1] == "rejection"})  # where the verifier plays no part of its own


def slow_unless(default, names):
    return [pytest.param(n, marks=() if n in default else pytest.mark.slow) for n in names]


OF_CHAINS = slow_unless({v for v in VERIFIERS if v != ON_CHAINS_BLOCK}, VERIFIERS)


def trial(drafter, verifier, target=None, **changes) -> Trial:
    if target is None:
        target = TARGETS.get(drafter, TARGET) if isinstance(drafter, str) else TARGET
    drafter = DRAFTERS[drafter] if isinstance(drafter, str) else drafter
    return Trial(target, drafter, verifier, **changes)


def table_trial(p, q, verifier="rejection", temperature=None) -> Trial:
    """Target and draft as tables, in the shape of the others."""
    shape = {k: v for k, v in SHAPE.items() if k != "vocab_size"}
    target, draft = (testing.table_lm(x, **shape) for x in (p, q))
    drafter = DraftModel(draft, temperature=temperature, prefill_chunk=4)
    return trial(drafter, verifier, target, draws=800)  # made to show a fault plainly, so they need no more


def test_plain_decoding_follows_the_enumerated_law():
    one = trial(NoDraft(), "rejection")
    testing.check_law(one)
    testing.check_rows_alone(one)


@pytest.mark.parametrize("drafter, verifier", pairs(LAWS))
def test_joint_law(drafter, verifier):
    # Half the draws where a round costs most; the slow sweep draws the rest.
    few = {} if drafter in SEEN else {"draws": 800}
    testing.check_law(trial(drafter, verifier, **few))


@pytest.mark.parametrize("drafter, verifier", BY_REJECTION)
def test_joint_law_while_stop_tokens_are_forbidden(drafter, verifier):
    testing.check_law(trial(drafter, verifier, draws=400), early_stop=1)


@pytest.mark.parametrize("drafter, verifier", BY_REJECTION)
def test_row_depends_on_neither_slot_nor_neighbours(drafter, verifier):
    testing.check_rows_alone(trial(drafter, verifier))


@pytest.mark.parametrize("drafter, verifier", TABLE)
def test_greedy_is_plain_at_every_stop_and_limit(drafter, verifier):
    one = trial(drafter, verifier)
    places = testing.check_same_as_plain(one)
    if drafter == "noisy twin":
        assert places == set(range(one.num_speculative_tokens + 1)), "stop tokens must fall on every slot of a block"


@pytest.mark.parametrize("drafter", slow_unless({"noisy twin"}, DRAFTERS))
def test_coupled_is_plain_token_for_token_under_sampling(drafter):
    testing.check_same_as_plain(trial(drafter, "coupled"), greedy=False)


@pytest.mark.parametrize("drafter, verifier", pairs({("noisy twin", "rejection")}))
def test_second_call_on_the_same_shapes_compiles_nothing(drafter, verifier):
    testing.check_no_retrace(trial(drafter, verifier))


@pytest.mark.parametrize("verifier", OF_CHAINS)
def test_self_draft_is_accepted_whole_under_every_setting(verifier):
    testing.check_accepts_all(trial(SELF, verifier))


@pytest.mark.parametrize("drafter", slow_unless({"noisy twin", "tree"}, MEMORYLESS))
def test_path_independence(drafter):
    testing.check_path_independence(trial(drafter, "rejection"))


@pytest.mark.slow
def test_path_independence_of_a_tree_drawn_apart():
    testing.check_path_independence(trial("tree", "traversal"))


@pytest.mark.parametrize("drafter", slow_unless({*SEEN, *OWN_ARGUMENT, "tree, replaced"}, DRAFTERS))
def test_proposals_are_well_formed(drafter):
    testing.check_proposal(trial(drafter, "rejection"))


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_verdicts_on_padded_slots_and_zero_probabilities(verifier):
    testing.check_verdicts(testing.checks.VERIFIERS[verifier])


LONG_WINDOW = pytest.param(drafters.SinkWindow(4, 300), id="sink and long window")
OF_CACHES = SEEN | {"cascade", "tree", "head, dynamic tree", "block head", "lookahead"}


@pytest.mark.parametrize("drafter", [*slow_unless(OF_CACHES, DRAFTERS), LONG_WINDOW])
def test_caches_have_a_length_that_xla_need_not_pad(drafter):
    """Those that are kept, and those that a model is called with, which may be made for one round."""
    one, size = trial(drafter, "rejection"), 3
    job = prepare(one.target, [[1, 2]], drafter=one.drafter, num_speculative_tokens=size, capacity=512)

    def round_of(decoder, request, tokens):
        return rounds.round(decoder, prefill.start(decoder, request, tokens, job.chunk))[0]

    patched = partial(mock.patch.object, LM, autospec=True)
    with patched("__call__", side_effect=LM.__call__) as calls, patched("read", side_effect=LM.read) as reads:
        state = jax.eval_shape(round_of, job.decoder, job.request, job.tokens)
    assert calls.called and reads.called, "block and prompt"
    seen = [call.args[2] for call in calls.call_args_list + reads.call_args_list]
    seen += [x for x in jax.tree.leaves(state, is_leaf=is_cache) if is_cache(x)]
    assert [x.capacity for x in seen] == [kv.room(x.capacity) for x in seen]


def is_cache(x) -> bool:
    return isinstance(x, kv.KVCache)


def constant(*row):
    return np.tile(row, (len(row), 1))


def share_of_first(one: Trial, name: str = "plain") -> np.ndarray:
    """Shares of each first token under one setting."""
    at = list(testing.SETTINGS).index(name) * one.rows
    first = np.array([row[0] for row in one.sequences(one.run())[at : at + one.rows]])
    return np.bincount(first, minlength=4) / one.rows


@pytest.mark.parametrize("temperature", [pytest.param(None, marks=pytest.mark.slow), 0.0])
def test_a_greedy_draft_is_a_point_mass(temperature):
    one = table_trial(constant(0.5, 0.5, 0, 0), constant(0.6, 0.4, 0, 0), temperature=temperature)
    testing.check_law(one)
    assert abs(share_of_first(one)[0] - 0.5) < 0.15  # dividing by the draft's softmax gives 0.83


@pytest.mark.parametrize("verifier", OF_CHAINS)
def test_residual_is_normalised_not_softmaxed(verifier):
    one = table_trial(constant(0.7, 0.3, 0, 0), constant(0.1, 0.9, 0, 0), verifier)
    share = share_of_first(one)
    assert share[2] == share[3] == 0
    assert abs(share[0] - 0.7) < 4 * np.sqrt(0.21 / one.rows)


@pytest.mark.parametrize("verifier", OF_CHAINS)
def test_bonus_follows_the_last_accepted_token(verifier):
    cycle = np.full((4, 4), 0.1 / 3) + (0.9 - 0.1 / 3) * np.roll(np.eye(4), 1, axis=1)
    one = table_trial(cycle, cycle, verifier)
    testing.check_law(one)


def test_bonus_follows_the_last_accepted_token_of_a_tree():
    cycle = np.full((4, 4), 0.1 / 3) + (0.9 - 0.1 / 3) * np.roll(np.eye(4), 1, axis=1)
    one = table_trial(cycle, cycle)
    tree = TreeModel(one.drafter.lm, (2, 2, 1), prefill_chunk=4)
    testing.check_law(dataclasses.replace(one, drafter=tree))


def test_acceptance_is_the_sum_of_minima():
    p, q = (0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4)
    testing.check_acceptance_rate(table_trial(constant(*p), constant(*q)), alpha=0.6)
    testing.check_accepts_all(table_trial(constant(*p), constant(*p)))


@pytest.mark.slow
def test_acceptance_of_the_twin_is_the_sum_of_minima_on_a_random_table():
    rng = np.random.default_rng(3)
    p, q = rng.dirichlet(np.ones(4), 2)
    alpha = float(np.minimum(p, q).sum())
    testing.check_acceptance_rate(table_trial(constant(*p), constant(*q)), alpha)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("drafter, verifier", TABLE)
def test_wider_sweep_of_draft_lengths(drafter, verifier, size):
    one = trial(drafter, verifier, num_speculative_tokens=size)
    testing.check_law(one)
    testing.check_rows_alone(one)
    testing.check_same_as_plain(one, greedy=verifier != "coupled")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_check_drafter_in_one_call(drafter):
    target = TARGETS.get(drafter, TARGET)
    testing.check_drafter(DRAFTERS[drafter], target, path_independent=drafter not in HISTORY)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_check_verifier_in_one_call(verifier):
    testing.check_verifier(testing.checks.VERIFIERS[verifier], target=TARGET)
