"""A planted DFlash head is right as often as asked at each place of its block, and the benchmark measures it."""

import dataclasses

import jax
import numpy as np
import pytest
from commands import script

from specjax.decode import round as rounds_of
from specjax.generation.generate import prepare
from specjax.measure.benchmark import case as cases
from specjax.measure.benchmark.case import Case
from specjax.measure.benchmark.rounds import rounds
from specjax.measure.benchmark.serving import serving
from specjax.measure.benchmark.table import Table
from specjax.models.config import LlamaConfig
from specjax.testing import planted_dflash

SHAPE = LlamaConfig(2048, 256, 512, 3, 4, 2, 32, max_position_embeddings=1024)


@pytest.mark.slow
def test_each_place_is_right_as_often_as_planted():
    """Of 400 tokens in turn as the last one. What stands before it does not matter."""
    target, head, pi = planted_dflash(SHAPE, [[0.7], [0.4], [0.9]], dtype="float32")
    tokens = np.arange(400)
    prompts = np.stack([np.roll(tokens, 7), tokens], axis=1).tolist()
    job = prepare(target, prompts, drafter=head, num_speculative_tokens=3, temperature=1.0)
    state = job.decoder.start(job.request, job.tokens, chunk=2)  # ``job.start`` would read 62 tokens of padding a row
    draft = jax.device_get(jax.jit(rounds_of.propose)(job.decoder, state)[0])
    assert draft.valid.all()
    reached, truth = np.ones(len(tokens), bool), tokens
    for place, chance in enumerate((0.7, 0.4, 0.9)):
        truth = pi[truth]
        right = draft.tokens[:, place] == truth
        assert np.mean(right[reached]) == pytest.approx(chance, abs=0.08)
        reached &= right


@pytest.mark.slow
def test_rounds_of_a_head_stand_beside_expected_tokens_and_it_drafts_in_an_engine(monkeypatch):
    monkeypatch.setitem(cases.SHAPES, "wide", SHAPE)
    request = dict(num_speculative_tokens=3, batch=8, prompt_length=16, max_new_tokens=24)
    speed = {"read": 1e10, "copy": 1e10}
    case = Case.planted_block_head("wide", ["0.7", "0.4", "0.9"], 3, "float32", speed, **request)
    table = Table({"bandwidth": speed})
    runs = rounds(case, table, ("T = 0", "T = 1"))
    texts = [case.planted_text(prompt, case.max_new_tokens) for prompt in case.prompts()]
    assert list(runs) == ["plain", "block, T = 0", "block, T = 1"] and all(run.tokens == texts for run in runs.values())
    row = table.rows[1]
    assert row["expected_tokens_per_round"] == pytest.approx(1 + 0.7 + 0.7 * 0.4 + 0.7 * 0.4 * 0.9)
    assert row["tokens_per_round"] == pytest.approx(row["expected_tokens_per_round"], abs=0.3)
    serving(case, table, (2,), None)
    assert all("same texts: True" in row["note"] for row in table.rows if "engine" in row["name"])


@pytest.mark.parametrize("args, named", [
    (["--drafter", "dflash", "--modes", "draft", "round"], "--drafter dflash has verify"),
    (["--drafter", "dflash", "--alpha", "0.7"], "--alpha is not for --drafter dflash"),
    (["--drafter", "dflash", "--ways", "chain"], "--ways is only for --drafter eagle3"),
    (["--drafter", "dflash", "--num-speculative-tokens", "10"], "room for 9 drafted tokens, got 10"),
    (["--acceptance", "0.8"], "--acceptance is only for --drafter eagle3 or dflash"),
    (["--drafter", "dflash", "--acceptance", "0.8:0.1", "0.7"], "--acceptance 0.8:0.1 0.7: dflash drafts one guess"),
])  # fmt: skip
def test_flags_that_the_block_head_would_ignore_are_refused(capsys, args, named):
    with pytest.raises(SystemExit):
        script("benchmark").parse(args)
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("shape, rates, says", [
    (SHAPE, [[0.8, 0.3]], "rows of sum at most 1"),
    (SHAPE, [[0.8]] * 10, "a block of 10 tokens has 9 places to draft, got 10"),
    (dataclasses.replace(SHAPE, num_key_value_heads=1, num_attention_heads=2), [[0.8]] * 3, "each place gets 0"),
])  # fmt: skip
def test_a_block_head_that_cannot_be_planted_is_refused(shape, rates, says):
    with pytest.raises(ValueError, match=says):
        planted_dflash(shape, rates, dtype="float32")
