"""The benchmark's modules at a shape small enough for any machine: what they report, not how fast it is."""

import dataclasses
import gc
import json
import os

import jax
import numpy as np
import pytest
from commands import script

from convert.llama_weights import to_hf as to_hf_tensors
from specjax import generate
from specjax.drafters import DraftModel, PromptLookup
from specjax.drafting import theory
from specjax.generation.generate import prepare
from specjax.measure.benchmark import early_exit as early_exit_module
from specjax.measure.benchmark import held, latency, peers, plots, serving, sweep
from specjax.measure.benchmark import timed as measure
from specjax.measure.benchmark.calls import DRAFT_STEP
from specjax.measure.benchmark.case import Case
from specjax.measure.benchmark.early_exit import early_exit
from specjax.measure.benchmark.peers import gpt_fast, weights
from specjax.measure.benchmark.rounds import against_theory, rounds
from specjax.measure.benchmark.steady import Steady
from specjax.measure.benchmark.table import Table
from specjax.models import quantized
from specjax.testing import count_traces


@pytest.fixture(scope="module")
def case():
    size = dict(num_speculative_tokens=3, batch=1, prompt_length=16, max_new_tokens=40)
    return Case.planted("tiny", "tiny", 0.7, "float32", {"read": 1e10, "copy": 1e10}, **size)


@pytest.fixture(scope="module")
def ours(case):
    """Our own runs, and the table that has their rows."""
    table = Table({"bandwidth": case.speed})
    return rounds(case, table, ("T = 0", "T = 1")), table


def test_rounds_write_the_planted_text(case, ours):
    runs, table = ours
    text = case.planted_text(case.prompts()[0], case.max_new_tokens)
    assert all(run.tokens == [text] for run in runs.values())
    assert [row["name"] for row in table.rows] == ["plain decoding, a step", "round, T = 0", "round, T = 1"]
    assert runs["T = 0"].rounds < runs["plain"].rounds == case.max_new_tokens


def test_speedups_stand_beside_theory_at_what_was_measured(case, ours, capsys):
    runs, _ = ours
    table = Table({"bandwidth": case.speed})
    against_theory(case, table, runs)
    assert "theory" not in table.sections, "the draft's step was not measured"
    table.add(DRAFT_STEP, runs["plain"].per_round / 4)
    against_theory(case, table, runs)
    one, other = table.sections["theory"]
    tokens = runs["T = 0"].totals.tokens_per_step
    assert one["c"] == pytest.approx(0.25) and one["theorem"] == pytest.approx(tokens / (3 * 0.25 + 1))
    assert one["measured"] == pytest.approx(runs["T = 0"].tokens_per_second / runs["plain"].tokens_per_second)
    assert other["round"] == "T = 1" and f"{other['theorem']:.2f} x plain" in capsys.readouterr().out


@pytest.mark.slow
def test_early_exit_is_measured_on_a_model_that_it_suits(case):
    """One layer of two drafts at the rate asked for, and what it reads is the floor of a draft step."""
    table = Table({"bandwidth": case.speed})
    early_exit(case, table, 1)
    (row,) = table.rows
    assert row["name"] == "round, early exit after layer 1" and "text right: True" in row["note"]
    assert 1.5 < row["tokens_per_round"] < 3.5
    cost = row["floor_ms"] / (case.step_floor * 1e3)
    head, layer = 512 * 64, 64 * (2 * 4 * 16 + 2 * 2 * 16) + 3 * 64 * 128
    assert cost == pytest.approx(1 + 3 * (head + layer) / (head + 2 * layer), rel=0.02)


def test_early_exit_stores_its_cache_as_the_case_does(case, monkeypatch):
    seen = []
    monkeypatch.setattr(early_exit_module, "generations", lambda lm, *_: seen.append(lm.kv_dtype) or 1 / 0)
    small = dataclasses.replace(case, target=dataclasses.replace(case.target, kv_dtype="int8"))
    with pytest.raises(ZeroDivisionError):
        early_exit(small, Table({"bandwidth": case.speed}), 1)
    assert seen == ["int8"]


def test_another_draft_is_stored_as_the_cases_own(case):
    small = dataclasses.replace(case, draft=dataclasses.replace(case.draft.quantize("fp8"), kv_dtype="int8"))
    other = small.drafting(case.draft)
    assert (quantized.kind_of(other.params), other.kv_dtype) == ("fp8", "int8")


@pytest.mark.parametrize("args, named", [
    (["--modes", "verify", "--corpus", "3"], "--corpus is for --modes drafters"),
    (["--modes", "sweep", "--sweep-tokens", "0", "2"], "--sweep-tokens must be at least 1"),
    (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
    (["--devices", "0"], "--devices must be at least 1"),
    (["--devices", "3", "--data-parallel", "2"], "--data-parallel must divide --devices, got 2 and 3"),
    (["--alpha", "1.5"], "acceptance rates are from 0 to 1, got 1.5"),
    (["--modes", "sweep", "--sweep-check-alphas", "-1"], "acceptance rates are from 0 to 1, got -1.0"),
    (["--modes", "early-exit", "--exit-layer", "32"], "--exit-layer of llama-3.1-8b is from 1 to 31, got 32"),
    (["--draft", "smollm2-135m"], "need one vocabulary, got 128256 and 49152 tokens"),
])  # fmt: skip
def test_flags_that_would_do_nothing_or_fail_later_are_refused(capsys, args, named):
    with pytest.raises(SystemExit):
        script("benchmark").parse(args)
    assert named in capsys.readouterr().err


def test_what_is_compiled_ahead_is_not_compiled_again(case):
    """Compiling side by side is worth something only if the calls find it."""
    drafter = PromptLookup()  # of a drafter without a model there is less to compile

    def options(size):
        return dict(drafter=drafter, num_speculative_tokens=size, max_new_tokens=8)

    def steady(size):
        return Steady.of(case.target, case.prompts(), drafter, size, 4, 128)

    generate(case.target, case.prompts(), **options(1))  # the small programs around the large ones
    steady(1).measure(repeats=1)
    prepare(case.target, case.prompts(), **options(2)).compile()
    steady(2).compile()
    with count_traces() as seen:
        generate(case.target, case.prompts(), **options(2))
        steady(2).measure(repeats=1)
    assert seen.compiled == 0


def test_steady_rounds_keep_what_theory_expects(case):
    """Over many rows: 8 rows of 30 rounds, two standard errors being about 0.2 tokens."""
    steady = Steady.of(case.target, case.prompts(8), DraftModel(case.draft), 3, 30, 192)
    _, tokens = steady.measure(repeats=1)
    assert abs(tokens - theory.expected_tokens(0.7, 3)) < 0.25
    assert Steady.of(case.target, case.prompts(2), None, 0, 5, 128).measure(repeats=1)[1] == 1.0


def test_a_rounds_time_leaves_the_hosts_share_out(case, monkeypatch):
    def timed(run, repeats):
        run()
        return 0.2 + 0.01 * run.args[0]

    monkeypatch.setattr(measure, "timed", timed)
    steady = Steady.of(case.target, case.prompts(2), None, 0, 5, 128)
    assert steady.measure()[0] == pytest.approx(0.01)


def test_no_time_is_made_up_where_more_rounds_took_less(case, monkeypatch):
    taken = iter([0.3, 0.2, 0.3, 0.7])  # few, all; few, all

    def timed(run, repeats):
        run()
        return next(taken, 0.5)

    monkeypatch.setattr(measure, "timed", timed)
    steady = Steady.of(case.target, case.prompts(2), None, 0, 5, 128)
    assert steady.measure()[0] == pytest.approx(0.1)
    with pytest.raises(ValueError, match="5 rounds took 500.00 ms and 1 took 500.00"):
        steady.measure()


def test_reading_is_measured_by_what_reads_fastest_here():
    """A maximum alone came out at a tenth of what a product reads on a CPU."""
    speed = measure.bandwidth(0.01)
    assert set(speed) == {"read", "copy"} and speed["read"] > 0.5 * speed["copy"] > 0


def test_sweep_section_tables_and_pictures(case, tmp_path, capsys, bars):
    table = Table({"bandwidth": case.speed}, tmp_path / "figures.json")
    sweep.sweep(case, table, batches=(1, 2), sizes=(1, 2), check_alphas=(0.4,), rounds=3)
    assert bars() == [("sweep", 8, 8)]
    found = json.loads((tmp_path / "figures.json").read_text())["sweep"]
    assert sweep.axes(found) == ([1, 2], [1, 2]) and len(found["checks"]) == 4 + 2
    assert all(1 <= check["tokens"] <= check["size"] + 1 for check in found["checks"])
    # With times of choice: a round of one token takes 1.5 plain steps, of two 2; at B = 2 nothing ever pays.
    found["plain"] = {"1": 1.0, "2": 1.0}
    found["points"] = [dict(batch=b, size=k, seconds=t) for b, k, t in ((1, 1, 1.5), (1, 2, 2), (2, 1, 3), (2, 2, 4))]
    assert sweep.speedup(found, 1, 2, 0.5) == pytest.approx(1.75 / 2)
    assert sweep.break_even(found, 1) == pytest.approx(0.501) and sweep.break_even(found, 2) is None
    lines = sweep.markdown(found, (0.5, 1.0)).splitlines()
    assert lines[2] == "| 1 | 1000.00 | 1500.00 | 2000.00 |"
    assert lines[-2:] == [
        "| 1 | 1.00 (K = 1) | 1.50 (K = 2) | 0.50 |",
        "| 2 | 0.50 (K = 1) | 0.75 (K = 2) | none |",
    ]
    eight = [{**point, "batch": 8, "seconds": 1.1 * point["seconds"]} for point in found["points"][:2]]
    grown = {**found, "plain": {"1": 1.0, "2": 1.0, "8": 1.05}, "points": found["points"] + eight}
    assert "| 8 over 1 | 1.05 | 1.10 | 1.10 |" in sweep.markdown(grown, (0.5,)).splitlines()
    short = {**grown, "points": grown["points"][:-1]}  # a run that ended before B = 8 was done
    assert sweep.axes(short) == ([1, 2], [1, 2])
    assert sweep.markdown(short, (0.5,)) == sweep.markdown(found, (0.5,))
    (tmp_path / "figures.json").write_text(json.dumps({**table.about, "rows": table.rows, "sweep": short}))
    capsys.readouterr()
    args = [str(tmp_path / "figures.json"), "--png", str(tmp_path / "pictures"), "--alphas", "0.5", "0.9"]
    assert script("plot_benchmark").main(args) == 0
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"sweep-speedup.png", "sweep-times.png"}


def test_a_run_that_is_cut_short_leaves_every_row_in_its_file(tmp_path):
    table = Table({}, tmp_path / "figures.json")
    table.add("a call", 0.002, 0.001)
    assert json.loads((tmp_path / "figures.json").read_text())["rows"][0]["ms"] == 2.0


def test_a_sweep_cut_short_before_its_first_round_is_no_section(case, tmp_path, monkeypatch):
    def plain_only(self, *_, **__):
        if len(table.rows) == 1:
            raise KeyboardInterrupt
        return 0.001, 1.0

    table = Table({"bandwidth": case.speed}, tmp_path / "figures.json")
    monkeypatch.setattr(Steady, "measure", plain_only)
    monkeypatch.setattr(sweep, "side_by_side", lambda actions: None)
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(case, table, batches=(1,), sizes=(1,))
    found = json.loads((tmp_path / "figures.json").read_text())
    assert len(found["rows"]) == 1 and plots.charts(found) == []


def test_every_row_with_a_floor_is_in_the_picture(ours):
    _, table = ours
    without = {"name": "prefill", "ms": 1.0, "floor_ms": None, "note": "some"}
    (chart,) = plots.charts({"rows": [*table.rows, without], "bandwidth": {"read": 1e10}})
    assert [row[0] for row in chart.rows] == [row["name"] for row in table.rows]


def test_latency_rows(case):
    table = Table({})
    latency.latency(case, table, lengths=(70, 130))
    names = [row["name"] for row in table.rows]
    assert names[0] == "prompt of 70, prefill of both models" and names[-1] == "prompt of 130, first round"
    assert table.rows[1]["first_tokens_ms"] == pytest.approx(table.rows[0]["ms"] + table.rows[1]["ms"])


def test_transformers_decodes_the_same_weights(case, ours):
    runs, _ = ours
    table = Table({})
    (peer,) = peers.load(["transformers"], None)
    peers.compare(peer, case, table, runs, repeats=1)
    step, round = table.rows
    assert step["as_planted"] == round["as_planted"] == 1.0 and step["tokens_per_round"] == 1.0
    # Its rounds are ours; the first of them is not in the time, nor is the last whole.
    assert round["tokens_per_round"] == pytest.approx(runs["T = 0"].totals.tokens_per_step, abs=0.4)


def test_an_engine_holds_as_much_memory_as_is_reported(case):
    gc.collect()
    before, table = sum(x.nbytes for x in jax.live_arrays()), Table({})
    weights_of_case = sum(x.nbytes for x in jax.tree.leaves((case.target, case.draft)))
    held.held(case, table, (2,))
    found = table.sections["memory"][2]
    others = before - weights_of_case  # arrays of other tests
    assert found["arrays"] - others == pytest.approx(found["reported"], rel=0.05)


@pytest.mark.slow
def test_transformers_batches_the_same_requests_beside_the_engine(case):
    table = Table({})
    serving.serving(case, table, (2,), None)
    (peer,) = peers.load(["transformers"], None)
    serving.against(peer, case, table, (2,))
    row, engine = table.rows[-1], table.rows[0]
    assert row["note"].endswith("2 of 2 texts as planted")
    assert row["specjax_times"]["plain"] == pytest.approx(engine["whole"] / row["whole"])


@pytest.mark.skipif("GPT_FAST" not in os.environ, reason="names a checkout of gpt-fast, at commit 091515a")
def test_gpt_fast_decodes_the_same_weights(case, ours):
    runs, _ = ours
    table = Table({})
    (peer,) = peers.load(["gpt-fast"], os.environ["GPT_FAST"])
    peers.compare(peer, case, table, runs, repeats=1)
    step, round = table.rows
    assert step["as_planted"] == round["as_planted"] == 1.0 and step["tokens_per_round"] == 1.0
    assert round["tokens_per_round"] == pytest.approx(runs["T = 0"].totals.tokens_per_step, abs=0.2)


def test_gpt_fast_gets_every_tensor_under_its_own_name(case):
    names = {gpt_fast._renamed(name) for name in weights.tensors(case.target)}
    layer = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "attention_norm")
    layer += ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "ffn_norm")
    whole = {"tok_embeddings.weight", "norm.weight", "output.weight"}
    assert names == whole | {f"layers.{i}.{part}.weight" for i in range(2) for part in layer}


def test_tensors_are_the_weights_themselves(case):
    """No copy of a large model, but for q, k and v, which lie interleaved."""
    found = weights.tensors(case.target)
    leaf = case.target.params["layers"]["1"]["mlp"]["down"]["weight"]
    assert found["model.layers.1.mlp.down_proj.weight"].data_ptr() == leaf.unsafe_buffer_pointer()
    given = to_hf_tensors(case.target.config, case.target.params)
    assert set(given) == set(found)
    for name, array in given.items():
        assert np.array_equal(found[name].numpy(), array), name


def test_missing_peers_are_refused_before_any_work(tmp_path, capsys, monkeypatch):
    benchmark = script("benchmark")
    monkeypatch.setattr(benchmark.measure, "bandwidth", None)  # not to be reached
    for args, says in (
        (["--peers", "gpt-fast"], "needs --gpt-fast FOLDER"),
        (["--peers", "gpt-fast", "--gpt-fast", str(tmp_path)], "holds no model.py"),
        (["--gpt-fast", str(tmp_path)], "only with --peers gpt-fast"),
        (["--peers", "transformers", "--batch", "2"], "one request"),
    ):
        assert benchmark.main(["--target", "tiny", "--draft", "tiny", *args]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and says in err and err.count("\n") == 1
