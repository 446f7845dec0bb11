"""A planted EAGLE-3 head is right as often as asked, by depth and rank, and the benchmark measures it beside theory."""

import dataclasses

import jax
import numpy as np
import pytest
from commands import script

from specjax.decode import round as rounds_of
from specjax.drafters import DynamicTree
from specjax.drafting import theory
from specjax.drafting.topology import expected_length
from specjax.generation.generate import prepare
from specjax.measure.benchmark import case as cases
from specjax.measure.benchmark import eagle
from specjax.measure.benchmark.case import Case
from specjax.measure.benchmark.rounds import rounds
from specjax.measure.benchmark.serving import serving
from specjax.measure.benchmark.sweep import sweep
from specjax.measure.benchmark.table import Table
from specjax.models.config import LlamaConfig
from specjax.testing import planted_eagle3

SHAPE = LlamaConfig(2048, 256, 512, 3, 4, 2, 32, max_position_embeddings=1024)
RATES = np.array([[0.7, 0.2], [0.4, 0.3]])


@pytest.fixture(scope="module")
def planted():
    return planted_eagle3(SHAPE, RATES, dtype="float32")


@pytest.fixture(scope="module")
def case():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cases.SHAPES, "wide", SHAPE)
        request = dict(num_speculative_tokens=2, batch=8, prompt_length=16, max_new_tokens=24)
        speed = {"read": 1e10, "copy": 1e10}
        return Case.planted_head(
            "wide", ["0.7:0.2", "0.4:0.3"], 2, ("chain", "dynamic"), (2, 5), "float32", speed, **request
        )


def drafts(planted, temperature, tree=None):
    """The draft after every token that can be drafted, one a row, and the two tokens that should follow."""
    target, head, pi = planted
    tokens = np.asarray(head.tokens)
    drafter = dataclasses.replace(head, tree=tree)
    prompts = np.stack([np.roll(tokens, 7), tokens], axis=1).tolist()
    job = prepare(target, prompts, drafter=drafter, num_speculative_tokens=2, temperature=temperature)
    state = job.decoder.start(job.request, job.tokens, chunk=2)  # ``job.start`` would read 62 tokens of padding a row
    draft = jax.device_get(jax.jit(rounds_of.propose)(job.decoder, state)[0])
    return draft, np.stack([pi[tokens], pi[pi[tokens]]], axis=1)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_a_chain_is_right_as_often_as_planted_at_each_depth(planted, temperature):
    draft, truth = drafts(planted, temperature)
    first, second = (draft.tokens == truth).T
    assert draft.valid.all()
    assert np.mean(first) == pytest.approx(0.7, abs=0.02)
    assert np.mean(second[first]) == pytest.approx(0.4, abs=0.06)  # of some 360 rows, chosen anew


def test_a_dynamic_tree_accepts_what_theory_expects(planted):
    """Its second guesses are right as often as planted. The theory knows which nodes the tree proposes."""
    draft, truth = drafts(planted, 0.0, DynamicTree(2, 5))
    parents = np.pad(np.asarray(draft.shape.parents), ((0, 0), (1, 0)))
    right = np.pad(draft.tokens, ((0, 0), (1, 0)), constant_values=-1)
    first = (right == truth[:, :1]) & (parents == 0)
    second = (right == truth[:, 1:]) & np.take_along_axis(first, parents, axis=1)
    accepted = np.mean(first.any(axis=1)) + np.mean(second.any(axis=1))
    assert np.mean(first.any(axis=1)) == pytest.approx(0.9, abs=0.02)
    assert accepted == pytest.approx(expected_length(eagle.likeliest(RATES, 2, 5), RATES), abs=0.06)


@pytest.mark.slow
def test_rounds_of_a_head_stand_beside_expected_tokens(case):
    table = Table({"bandwidth": case.speed})
    runs = rounds(case, table, ("T = 0", "T = 1", "T = 0.8, top-p 0.9"))
    assert list(runs) == [
        "plain", "chain, T = 0", "chain, T = 1", "chain, T = 0.8, top-p 0.9", "dynamic tree of 5, T = 0",
        "dynamic tree of 5, T = 1",
    ]  # fmt: skip
    texts = [case.planted_text(prompt, case.max_new_tokens) for prompt in case.prompts()]
    assert all(run.tokens == texts for run in runs.values())
    chain, tree = table.rows[1], table.rows[4]
    assert chain["expected_tokens_per_round"] == pytest.approx(1 + 0.7 + 0.7 * 0.4)
    for row in (chain, tree):
        assert row["tokens_per_round"] == pytest.approx(row["expected_tokens_per_round"], abs=0.25)
    assert tree["tokens_per_round"] > chain["tokens_per_round"] + 0.2


@pytest.mark.slow
def test_the_head_drafts_in_an_engine_and_in_the_middle_of_texts(case):
    """In a sweep the head has not followed the prompts, so it must catch up first."""
    table = Table({"bandwidth": case.speed})
    chain = dataclasses.replace(case, heads=case.heads[:1])
    serving(chain, table, (2,), None)
    assert [row["name"] for row in table.rows] == [
        "engine, plain, 2 requests, a round", "engine, chain, K = 2, 2 requests, a round"
    ]  # fmt: skip
    assert all("same texts: True" in row["note"] for row in table.rows) and table.rows[1]["times_plain"] > 0
    sweep(case, table, batches=(8,), sizes=(2,), rounds=20)
    for name in ("sweep", "sweep, dynamic tree of 5"):
        (check,) = table.sections[name]["checks"]
        assert check["tokens"] == pytest.approx(check["expected"], abs=0.25)


def test_presets_follow_from_what_was_published():
    table = eagle.acceptance_table(["mt-bench"], 9)
    assert table[:2, 0].tolist() == pytest.approx([0.74, 0.54 / 0.74]) and table[8].tolist() == table[6].tolist()
    assert 1 + theory.expected_accepted_length(table[:7, 0]) == pytest.approx(3.53)
    for name, tokens in eagle.TREE_TOKENS.items():
        levels = eagle.acceptance_table([name], 8).sum(axis=1)
        assert 1 + theory.expected_accepted_length(levels) == pytest.approx(tokens, abs=0.01)


@pytest.mark.parametrize("args, named", [
    (["--drafter", "eagle3", "--modes", "draft", "round"], "--modes draft needs a draft model"),
    (["--drafter", "eagle3", "--alpha", "0.7"], "--alpha is not for --drafter eagle3"),
    (["--drafter", "eagle3", "--acceptance", "often"], "acceptance is one of mt-bench"),
    (["--drafter", "eagle3", "--acceptance", "0.8:0.3"], "add up to at most 1"),
    (["--acceptance", "0.8"], "--acceptance is only for --drafter eagle3"),
])  # fmt: skip
def test_flags_that_the_drafter_would_ignore_are_refused(capsys, args, named):
    with pytest.raises(SystemExit):
        script("benchmark").parse(args)
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("shape, rates, says", [
    (SHAPE, [[0.8, 0.3]], "rows of sum at most 1"),
    (dataclasses.replace(SHAPE, intermediate_size=64), [[0.8]] * 8, "needs a wider model"),
])  # fmt: skip
def test_a_head_that_cannot_be_planted_is_refused(shape, rates, says):
    with pytest.raises(ValueError, match=says):
        planted_eagle3(shape, rates, dtype="float32")
