"""The benchmark over shapes that are no Llama's: a Qwen3 pair, and T5s, whose encoder runs once a request."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from commands import script

from specjax.measure.benchmark import calls, serving, sweep
from specjax.measure.benchmark import case as cases
from specjax.measure.benchmark.case import Case
from specjax.measure.benchmark.rounds import rounds
from specjax.measure.benchmark.table import Table
from specjax.measure.benchmark.timed import weight_bytes
from specjax.models import families

SPEED = {"read": 1e10, "copy": 1e10}
REQUEST = dict(num_speculative_tokens=3, batch=1, prompt_length=16, max_new_tokens=40)


@pytest.fixture(scope="module")
def t5():
    return Case.planted("tiny-t5", "tiny-t5", 0.7, "float32", SPEED, **REQUEST)


@pytest.fixture(scope="module")
def qwen3():
    tiny = dataclasses.replace(cases.SHAPES["tiny"], model_type="qwen3", qk_norm=True, tie_word_embeddings=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cases.SHAPES, "tiny-qwen3", tiny)
        return Case.planted("tiny-qwen3", "tiny-qwen3", 0.7, "float32", SPEED, **REQUEST)


@pytest.mark.parametrize("family", ["t5", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_rounds_write_the_planted_text_and_draft_as_often_right_as_planted(family, request):
    case, table = request.getfixturevalue(family), Table({"bandwidth": SPEED})
    runs = rounds(case, table, ("T = 0", "T = 1"))
    assert all(run.tokens == [case.planted_text(case.prompts()[0], case.max_new_tokens)] for run in runs.values())
    guess = np.asarray(jax.jit(lambda lm, x: lm.embed(x) @ lm.params["lm_head"].T)(case.draft, np.arange(512)))
    assert np.mean(guess.argmax(axis=1) == case.successor) == pytest.approx(0.7, abs=0.01)
    plain, greedy, sampled = table.rows
    assert greedy["tokens_per_round"] == sampled["tokens_per_round"] == pytest.approx(2.5, abs=0.7)
    times = greedy["expected_tokens_per_round"] * plain["ms"] / greedy["ms"]
    assert f"(at the expected tokens: {times:.2f};" in greedy["note"]


def test_a_step_of_a_t5_reads_neither_the_encoder_nor_what_makes_the_sources_entries(t5):
    hidden, inner, wide, vocab, layers, heads, buckets = 64, 4 * 16, 128, 512, 2, 4, 32
    attentions = 4 * hidden * inner + 2 * hidden * inner  # all of the text's; q and o of the source's
    layer = attentions + 3 * hidden * wide + 3 * hidden
    assert weight_bytes(t5.target) == 4 * (layers * layer + vocab * hidden + hidden + buckets * heads)
    assert weight_bytes(t5.target, 1) == weight_bytes(t5.target) - 4 * layer


def test_draft_steps_of_a_t5_see_a_source(t5, monkeypatch):
    seen = []
    monkeypatch.setattr(calls, "all_seconds", lambda named: seen.extend(named.values()) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calls.draft(t5, Table({}))
    assert [call.arguments[1].source.tolist() for call in seen] == [[16], [16]]


@pytest.mark.slow
def test_a_t5_is_swept_and_served(t5):
    table = Table({"bandwidth": SPEED})
    serving.serving(t5, table, (2,), None)
    assert all("same texts: True" in row["note"] for row in table.rows)
    sweep.sweep(t5, table, batches=(2,), sizes=(3,), rounds=20)
    (check,) = table.sections["sweep"]["checks"]
    assert check["tokens"] == pytest.approx(check["expected"], abs=0.5)


@pytest.mark.parametrize("name, weights", [
    ("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360), ("t5-small", 76_961_152), ("t5-xxl", 11_135_332_352),
])  # fmt: skip
def test_a_published_shape_has_as_many_weights_as_the_published_model(name, weights):
    leaves = jax.tree.leaves(families.structure(cases.SHAPES[name])[1])
    assert sum(math.prod(leaf.shape) for leaf in leaves) == weights


@pytest.mark.parametrize("args, named", [
    (["--draft", "tiny"], "need an encoder both, or none, got tiny-t5 and tiny"),
    (["--drafter", "eagle3"], "--drafter eagle3 is for decoders, and tiny-t5 has an encoder"),
    (["--modes", "waits"], "--modes waits and --serving-chunk are for decoders: tiny-t5"),
    (["--modes", "serving", "--serving-chunk", "64"], "--modes waits and --serving-chunk are for decoders: tiny-t5"),
])  # fmt: skip
def test_what_an_encoder_does_not_do_is_refused(capsys, args, named):
    pair = [] if "--drafter" in args or "--draft" in args else ["--draft", "tiny-t5"]
    with pytest.raises(SystemExit):
        script("benchmark").parse(["--target", "tiny-t5", *pair, *args])
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("names", [("tiny-t5", "tiny-t5"), ("qwen3-8b", "qwen3-0.6b")])
def test_peers_of_other_models_than_llamas_are_refused_before_any_work(capsys, names, monkeypatch):
    benchmark = script("benchmark")
    monkeypatch.setattr(benchmark.measure, "bandwidth", None)  # not to be reached
    assert benchmark.main(["--target", names[0], "--draft", names[1], "--peers", "transformers"]) == 2
    assert "--peers run models of the type llama, got" in capsys.readouterr().err


@pytest.mark.parametrize("name, args", [
    ("spec_bench", ["--prompts", "some", "--planted", "t5-xxl", "t5-small"]),
    ("train_drafter", ["--kind", "eagle3", "--planted", "t5-small"]),
    ("load_server", ["--target", "t5-xxl"]),
])  # fmt: skip
def test_scripts_for_decoders_alone_offer_no_shape_with_an_encoder(capsys, name, args):
    with pytest.raises(SystemExit):
        script(name).parse(args)
    assert "invalid choice: 't5-" in capsys.readouterr().err
