"""The other scripts, run in this process on a tiny checkpoint: what they print, and how they refuse."""

import json
import sys

import pytest
from commands import ROOT, run, script
from hf_folders import HF, write_hf
from small_tokenizers import byte_level

import specjax
from specjax.checkpoints import trained_drafters as files


@pytest.mark.slow
def test_parity_report(capsys, folder, monkeypatch):
    module = script("parity")
    monkeypatch.setattr(sys, "argv", ["parity.py", "--model", folder, "--max-new-tokens", "10", "--prompts", "2"])
    assert module.main() == 0
    out = capsys.readouterr().out
    assert out.count("identical") == 6 and "every promised claim held" in out


def test_ci_runs_the_command_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("python ")]
    assert commands and all(f"    {command}\n" in readme or f"\n{command}\n" in readme for command in commands)


def test_the_drafter_is_chosen_by_the_model():
    """The default model is drafted for by the head that comes with specjax, others by prompt lookup."""
    parse = script("generate").parse
    args = parse(["--prompt", "a"])
    assert (args.drafter, args.trained) == ("ngram-trained", "smollm2-135m-instruct-eagle3")
    assert args.num_speculative_tokens == 3
    args = parse(["--prompt", "a", "--model", "elsewhere"])
    assert (args.drafter, args.num_speculative_tokens) == ("ngram", 5)
    args = parse(["--prompt", "a", "--drafter", "trained", "--trained", "x", "--num-speculative-tokens", "7"])
    assert (args.drafter, args.trained, args.num_speculative_tokens) == ("trained", "x", 7)


def test_drafters_are_compared_by_task(capsys, tmp_path, bars):
    """On few prompts and a model of two layers: what needs more is left out, and said to be."""
    path, prompts = tmp_path / "chat", tmp_path / "prompts.jsonl"
    write_hf(path, {**HF, "vocab_size": 300, "max_position_embeddings": 256}, tokenizer=byte_level())
    prompts.write_text('{"prompt": "ab ab ab", "category": "one"}\n{"prompt": "abc", "category": "two"}\n')
    compare = script("compare_drafters")
    common = ["--model", str(path), "--prompts", str(prompts), "--max-new-tokens", "8", "--trained"]
    only = ["--only", "prompt lookup, 3..2", "lookahead", "oracle", "--json", str(tmp_path / "d.json")]
    assert compare.main([*common, *only]) == 0
    assert "leaves no prompts to count tables from" in capsys.readouterr().out
    assert bars()[:2] == [("plain: one", 1, 1), ("plain: two", 1, 1)] and len(bars()) == 8
    rows = {row["name"]: row["tasks"] for row in json.loads((tmp_path / "d.json").read_text())["rows"]}
    assert set(rows) == {"plain", "prompt lookup, 3..2", "lookahead, window 8", "oracle"}
    assert rows["plain"]["one"]["tokens_per_step"] == 1 and rows["oracle"]["two"]["tokens_per_step"] > 1
    assert compare.main([*common, "--only", "lokahead"]) == 2
    assert "--only lokahead begins none of these names: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare.main([*common, "--sizes", "0"])


@pytest.mark.parametrize("args, named", [
    (["--kind", "early-exit", "--start-from", "x"], "give its folder as --model"),
    (["--kind", "eagle3", "--row-tokens", "17"], "--row-tokens is for texts with --passages"),
    (["--kind", "eagle3", "--heads", "2"], "--heads is for --kind medusa, not eagle3"),
    (["--kind", "draft", "--unroll", "2"], "--unroll is for --kind eagle or eagle3, not draft"),
    (["--kind", "eagle3", "--block-size", "4"], "--block-size is for --kind dflash, not eagle3"),
    (["--kind", "dflash", "--block-size", "1"], "--block-size must be at least 2, got 1"),
    (["--kind", "eagle3", "--every", "0"], "--every must be"),
    (["--kind", "eagle3", "--passages", "2", "--text-tokens", "9", "--row-tokens", "8"], "must fit into a row"),
    (["--kind", "medusa", "--start-from", "x", "--heads", "2"], "--heads can't be chosen with --start-from"),
])  # fmt: skip
def test_training_flags_that_would_do_nothing_are_refused(capsys, args, named):
    with pytest.raises(SystemExit):
        script("train_drafter").parse(args)
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("kinds", [
    "eagle3",
    pytest.param("eagle3 draft", marks=pytest.mark.slow),
    pytest.param("eagle3 dflash medusa pass", marks=pytest.mark.slow),
])  # fmt: skip
def test_train_use_and_load_a_drafter(capsys, tmp_path, kinds):
    """A head is trained from the command line, goes on from its checkpoints, and drafts; so does a model to leave."""
    kinds = kinds.split()
    path = tmp_path / "chat"
    write_hf(path, {**HF, "vocab_size": 300, "max_position_embeddings": 256}, tokenizer=byte_level())
    train = script("train_drafter")
    common = ["--model", str(path), "--texts", str(tmp_path / "t.npz"), "--dialogues", "8", "--sample-batch", "8"]
    common += ["--text-tokens", "127", "--batch", "4", "--every", "2", "--passages", "4", "--row-tokens", "160"]
    shape = {"eagle3": ["--unroll", "2", "--draft-vocab", "64"], "medusa": ["--draft-vocab", "64"]}
    shape["dflash"] = ["--draft-vocab", "64", "--head-layers", "1"]
    for kind, steps in (("eagle3", "2"), ("eagle3", "4"), *((kind, "2") for kind in kinds[1:])):
        where = ["--checkpoints", str(tmp_path / kind), "--out", str(tmp_path / f"{kind}.safetensors")]
        where += ["--plot", str(tmp_path / f"{kind}.svg")] if kind == "eagle3" else []
        assert train.main(["--kind", kind, "--steps", steps, *common, *where, *shape.get(kind, [])]) == 0
        out = capsys.readouterr().out
        assert '"step": 2,' in out or steps == "4"
        read = "is there and is read as it is; --dialogues --sample-batch --text-tokens --passages --row-tokens would"
        assert (read in out) == ((kind, steps) != ("eagle3", "2"))
    assert "token 2" in (tmp_path / "eagle3.svg").read_text() and not list(tmp_path.glob("*.parts"))
    for kind in kinds:
        on = ["--kind", kind, "--steps", "2", "--start-from", str(tmp_path / f"{kind}.safetensors"), *common]
        fewer = ["--draft-vocab", "16", "--out", str(tmp_path / f"{kind} cut.safetensors")]
        on += fewer if kind in ("eagle3", "dflash") else []
        assert train.main([*on, "--json", str(tmp_path / "curve.json")]) == 0
        assert json.loads((tmp_path / "curve.json").read_text())["texts"]["size"] == 160
        capsys.readouterr()
    assert train.main(["--kind", "eagle", *on[2:]]) == 2
    kept = {"draft": "model"}.get(kinds[-1], kinds[-1])
    assert f"is of kind '{kept}', which --kind eagle can't train on" in capsys.readouterr().err
    for kind in kinds:
        code, out, err = run(
            capsys, "--model", str(path), "--prompt", "abc", "--drafter", "trained", "--trained",
            str(tmp_path / f"{kind}.safetensors"), "--compare", *(["--tree-nodes", "6"] if kind == "eagle3" else []),
        )  # fmt: skip
        assert code == 0 and "error" not in err and "identical output" in out
    small = specjax.load(path, kv_dtype="int8")
    whole, cut = (files.load(tmp_path / f"{name}.safetensors", small) for name in ("eagle3", "eagle3 cut"))
    assert set(cut.tokens.tolist()) < set(whole.tokens.tolist()) and cut.params["lm_head"].shape[0] == 16
    more = ["--kind", "eagle3", "--start-from", str(tmp_path / "eagle3 cut.safetensors"), "--draft-vocab", "64"]
    assert train.main([*common, "--texts", str(tmp_path / "none.npz"), *more]) == 2, "before any text is sampled"
    assert not (tmp_path / "none.npz").exists()
    assert "can only cut the 16 tokens of that head" in capsys.readouterr().err
    if "draft" not in kinds:
        return
    assert files.load(tmp_path / "draft.safetensors", small).lm.kv_dtype == "int8"
    code, _, err = run(
        capsys, "--model", str(path), "--prompt", "abc", "--drafter", "trained", "--trained",
        str(tmp_path / "draft.safetensors"), "--tree-nodes", "6",
    )  # fmt: skip
    assert code == 2 and "--tree-nodes needs a head" in err
    where = ["--kind", "early-exit", "--exit-layers", "1", "--steps", "2", "--out", str(tmp_path / "early")]
    assert train.main([*common, *where]) == 0
    with pytest.raises(SystemExit):
        train.main([*common, *where])
    assert "exists already" in capsys.readouterr().err
    code, out, err = run(
        capsys, "--model", str(tmp_path / "early"), "--prompt", "abc", "--drafter", "layer-skip", "--exit-layer", "1",
        "--compare",
    )  # fmt: skip
    assert code == 0 and "error" not in err and "identical output" in out
