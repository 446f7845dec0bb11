"""generate.py, run in this process on a tiny checkpoint: what it prints, and how it refuses."""

import json
import sys

import pytest
from cli import choices
from commands import run, script
from hf_folders import HF, write_hf
from small_tokenizers import byte_level
from tokenizers import pre_tokenizers

from specjax.measure import timing
from specjax.models import parallel
from specjax.report import record


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "other"
    order = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    write_hf(path, {**HF, "vocab_size": 300}, tokenizer=byte_level(order=order))
    return str(path)


def test_text_and_record(capsys, folder, bars):
    code, out, err = run(capsys, "--model", folder, "--prompt", "abcabcabc", "--memory")
    assert code == 0 and err.splitlines()[1:] == [
        "drafter  ngram (prompt lookup max 3, prompt lookup min 2), at most 5 tokens a round", "prompt   abcabcabc", ""
    ]  # fmt: skip
    assert [what for what, *_ in bars()] == ["compiling, or fetching compiled programs", "reading the prompt"]
    lines = out.strip().splitlines()
    assert "tokens 12 in" in lines[-4] and "acceptance rate" in lines[-3] and "tokens/s" in lines[-2]
    assert "target weights" in lines[-1] and "draft state 0.0 MB" in lines[-1]


def test_a_prompt_that_is_no_unicode_is_refused(capsys, folder):
    code, _, err = run(capsys, "--model", folder, "--prompt", "a\udc80")
    assert code == 2 and "prompt 0" in err and "lone surrogate" in err


def test_the_date_of_a_template_is_shown_recorded_and_can_be_given(capsys, tmp_path):
    dated = byte_level(template="{{ strftime_now('%d') }}{{ x }}")
    write_hf(tmp_path / "m", {**HF, "vocab_size": 300}, tokenizer=dated)
    given = ("--model", str(tmp_path / "m"), "--prompt", "a", "--chat", "--chat-template-kwargs", '{"x": "y"}')
    code, out, _ = run(capsys, *given)
    assert code == 0 and "the chat template was told that today is 20" in out
    code, out, _ = run(capsys, *given, "--date", "2024-07-26", "--json")
    found = json.loads(out)
    assert code == 0 and found["date"] == "2024-07-26" and len(found["completions"][0]["prompt_token_ids"]) == 3
    with pytest.raises(SystemExit):
        run(capsys, *given[:-1], "{")
    assert "must be JSON" in capsys.readouterr().err


def test_streamed_text_is_the_text(capsys, folder):
    streamed = run(capsys, "--model", folder, "--prompt", "abcabc")[1]
    whole = run(capsys, "--model", folder, "--prompt", "abcabc", "--no-stream")[1]
    assert streamed.split("\n\ntokens")[0] == whole.split("\n\ntokens")[0]


def test_json_of_a_batch(capsys, folder):
    args = ("--model", folder, "--prompt", "abcabc", "--prompt", "xyz", "--json", "--compare")
    code, out, _ = run(capsys, *args, "--drafter", "model", "--draft-model", folder)
    data = json.loads(out)
    record.check(data)
    assert code == 0 and len(data["completions"]) == 2
    assert data["settings"]["drafter"] == {
        "name": "model", "draft_model": folder, "quantize_draft": None, "any_draft_tokenizer": False,
    }  # fmt: skip
    assert not data["timing"]["streamed"]
    for completion in data["completions"]:
        assert completion["rounds"] is None and completion["origins"] == ["accepted"] * 5 + ["bonus"] + (
            ["accepted"] * 5 + ["bonus"]
        )
        assert len(completion["tokens"]) == completion["metrics"]["completion_tokens"] == 12
        assert completion["metrics"]["draft_acceptance_rate"] == 1.0  # the draft is the target
        assert completion["metrics"]["per_step_drafted"] == [5, 5]
    assert data["timing"]["identical"] is True and data["timing"]["ratio"] > 0


def test_eight_bits_and_a_mesh(capsys, folder, monkeypatch):
    """The flags reach both models; what they do is tested in test_quantized.py and eight_devices.py."""
    meshes = []  # asked for; there is one device here
    mesh_of = parallel.mesh
    monkeypatch.setattr(parallel, "mesh", lambda *sizes: meshes.append(sizes) or mesh_of(1))
    args = ("--model", folder, "--prompt", "abcabc", "--drafter", "model", "--draft-model", folder, "--json")
    code, out, err = run(capsys, *args, "--quantize", "int8", "--quantize-draft", "fp8", "--kv-dtype", "int8",
                         "--devices", "4", "--data-parallel", "2", "--compare")  # fmt: skip
    assert code == 0, err
    data = json.loads(out)
    assert meshes == [(4, 2)] and data["timing"]["identical"]
    settings = data["settings"]
    assert (settings["quantize"], settings["kv_dtype"], settings["devices"]) == ("int8", "int8", 1)
    assert settings["drafter"]["quantize_draft"] == "fp8"
    assert 0.5 < data["completions"][0]["metrics"]["draft_acceptance_rate"]


def test_too_many_devices_are_refused(capsys, folder):
    code, _, err = run(capsys, "--model", folder, "--prompt", "a", "--devices", "99")
    assert code == 2 and "99 devices" in err


def test_trace_tells_the_fate_of_every_token(capsys, folder):
    args = ("--model", folder, "--prompt", "abcabcabc", "--trace", "--temperature", "1")
    out = run(capsys, *args)[1]
    assert "plain" in out or "correction" in out or "bonus" in out
    assert "\033[" not in out  # not a terminal
    data = json.loads(run(capsys, *args, "--json")[1])
    (completion,) = data["completions"]
    rebuilt = []
    for entry in completion["rounds"]:
        rebuilt += [draft["token"] for draft in entry["drafted"] if draft["accepted"]]
        rebuilt += [] if entry["token"] is None else [entry["token"]]
        assert all(0 <= draft["p"] <= 1 and 0 < draft["q"] <= 1 for draft in entry["drafted"])
    assert rebuilt == completion["tokens"]


def test_log_probabilities_seeds_and_the_least_length_reach_the_record(capsys, folder):
    flags = "--logprobs 2 --min-new-tokens 12 --temperature 1 --seed random --compare --json".split()
    code, out, err = run(capsys, "--model", folder, "--prompt", "abc", "--verifier", "coupled", *flags)
    data = json.loads(out)
    (completion,) = data["completions"]
    assert code == 0 and err == f"note: --seed {data['settings']['seed']}\n"
    assert completion["seed"] == data["settings"]["seed"] and data["timing"]["identical"]
    assert len(completion["tokens"]) == 12 and data["settings"]["sampling"]["min_new_tokens"] == 12
    assert len(completion["logprobs"]) == 12 and [len(best) for best in completion["top_logprobs"]] == [2] * 12
    assert max(completion["tokens"]) < 259, "the tokenizer has no more ids, though the model has 300 rows"
    assert data["environment"]["prng"] and data["environment"]["x64"] is False


def test_filters_without_a_temperature_are_said_to_do_nothing(capsys, folder):
    args = ("--model", folder, "--prompt", "abc", "--top-k", "3")
    code, _, err = run(capsys, *args, "--top-p", "0.5")
    assert code == 0 and err.count("note: ") == 1 and "\nnote: --top-p and --top-k without --temperature" in err
    assert "note: " not in run(capsys, *args, "--temperature", "0")[2]


def test_json_to_a_file_keeps_the_text_and_the_rounds(capsys, folder, tmp_path, monkeypatch):
    calls = {"plain_step": 0.1, "draft": 0.01, "verify": {"1": 0.1, "6": 0.2}}
    # The real ones take as long to compile as the run; tests/report/test_record.py has them.
    monkeypatch.setattr(timing, "calls", lambda job: calls)
    args = ("--model", folder, "--prompt", "abcabc", "--profile")
    code, out, _ = run(capsys, *args, "--json", str(tmp_path / "run.json"))
    data = record.load(tmp_path / "run.json")
    (completion,) = data["completions"]
    assert code == 0 and out.startswith(completion["text"])
    assert "a plain step 100.0 ms; drafting 10.0 ms" in out.splitlines()[-1]
    assert completion["rounds"] and data["timing"]["calls"] == calls
    assert data["settings"]["drafter"] == {"name": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    assert data["settings"]["dtype"] == "float32" and data["environment"]["platform"] == "cpu"


def test_stop_string_and_prompt_file(capsys, folder, tmp_path):
    (tmp_path / "p.txt").write_text("abcabc")
    text = json.loads(run(capsys, "--model", folder, "--prompt-file", str(tmp_path / "p.txt"), "--json")[1])
    tokens = text["completions"][0]["tokens"]
    stop = byte_level().decode(tokens[3:5])
    data = json.loads(run(capsys, "--model", folder, "--prompt", "abcabc", "--stop", stop, "--json")[1])
    (completion,) = data["completions"]
    assert completion["finish_reason"] == "stop" and completion["text"].endswith(stop)
    assert completion["tokens"] == tokens[: len(completion["tokens"])]


@pytest.mark.parametrize(
    "args, says",
    [
        (["--prompt", ""], "empty"),
        (["--prompt", "a", "--num-speculative-tokens", "-1"], "num_speculative_tokens"),
        (["--prompt", "a", "--top-p", "0"], "top_p"),
        (["--prompt", "a", "--top-p", "1.5"], "top_p"),
        (["--prompt", "a", "--temperature", "nan"], "temperature"),
        (["--prompt", "a", "--max-new-tokens", "-2"], "max_new_tokens"),
        (["--prompt", "a" * 3000], "context"),
        (["--prompt", "a", "--prompt-lookup-min", "4"], "prompt_lookup_min"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, folder, args, says):
    code, out, err = run(capsys, "--model", folder, *args)
    assert code == 2 and not out
    assert err.startswith("error: ") and says in err and "Traceback" not in err


@pytest.mark.parametrize(
    "args, says",
    [
        (["--frobnicate"], "--frobnicate"),
        (["--drafter", "model"], "--draft-model"),
        (["--draft-model", "x"], "--drafter model"),
        (["--compare", "--drafter", "none"], "nothing to compare"),
        (["--stream", "--json"], "--stream"),
        (["--memory", "--json"], "--memory"),
        (["--compare", "--trace"], "--trace"),
        (["--logprobs", "5"], "--json"),
        (["--drafter", "none", "--num-speculative-tokens", "4"], "--drafter none drafts nothing; leave one out"),
        (["--drafter", "none", "--prompt-lookup-max", "3"], "--prompt-lookup-max is used only with --drafter ngram"),
        (["--json", "nowhere/run.json"], "there is no folder nowhere"),
        (["--drafter", "retrieval"], "--drafter retrieval needs --datastore"),
        (["--quantize-draft", "int8"], "--quantize-draft is used only with --drafter model"),
        (["--adaptive", "cost"], "--adaptive cost needs --draft-cost"),
        (["--gamma-min", "2"], "--gamma-min is used only with --adaptive entropy"),
        (["--adaptive", "heuristic", "--drafter", "jacobi"], "nothing to choose"),
        (["--adaptive", "heuristic", "--drafter", "lookahead"], "nothing to choose"),
    ],
)
def test_flags_that_do_not_go_together(capsys, args, says):
    with pytest.raises(SystemExit) as stop:
        script("generate").main(["--prompt", "a", *args])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and says in err and err.count("\n") == 1


@pytest.mark.slow
def test_every_drafter_has_a_name_and_writes_what_plain_decoding_does(capsys, folder, tmp_path, monkeypatch):
    prompt = ("--model", folder, "--prompt", "abcabcabc", "--no-stream")
    (tmp_path / "corpus.txt").write_text("abcabcabd abc cba")
    code, text, _ = run(capsys, *prompt, "--drafter", "none", "--json", str(tmp_path / "run.json"))
    assert code == 0
    plain = json.loads((tmp_path / "run.json").read_text())["completions"][0]["tokens"]
    build = ["build_datastore.py", str(tmp_path / "store"), str(tmp_path / "corpus.txt"), "--model", folder]
    monkeypatch.setattr(sys, "argv", build)
    assert script("build_datastore").main() == 0
    monkeypatch.setattr(sys, "argv", [*build, "--extend"])
    assert script("build_datastore").main() == 0
    own = {
        "retrieval": ("--datastore", str(tmp_path / "store")),
        "bigram": ("--corpus", str(tmp_path / "corpus.txt")),
        "oracle": ("--known", str(tmp_path / "run.json")),
        "layer-skip": ("--exit-layer", "1", "--adaptive", "entropy"),
        "lookahead": ("--lookahead-window", "3", "--lookahead-guesses", "2"),
        "cascade": ("--draft-model", folder),
        "tree-model": ("--draft-model", folder, "--tree-widths", "2", "2"),
    }
    assert set(own) < set(choices.CHOICES)
    capsys.readouterr()
    rates = {}
    for name, flags in own.items():
        code, out, err = run(capsys, *prompt, "--drafter", name, *flags, "--num-speculative-tokens", "2", "--json")
        assert code == 0, err
        (completion,) = json.loads(out)["completions"]
        assert completion["tokens"] == plain, name
        rates[name] = completion["metrics"]["draft_acceptance_rate"]
    assert rates["oracle"] == rates["cascade"] == rates["tree-model"] == 1.0


@pytest.mark.parametrize("name", choices.CHOICES)
def test_names_build_what_they_say(name):
    """Without loading anything: the flags that a name uses are those of the table."""
    choice = choices.CHOICES[name]
    assert set(choice.flags) <= set(choices.FLAGS)
    assert all(set(policy.flags) <= set(choices.POLICY_FLAGS) for policy in choices.POLICIES.values())


def test_layer_search_goes_on_where_it_was(capsys, folder, tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("abcabc\nbcd\n")
    state = tmp_path / "layers.json"
    args = ["search_layers.py", "--model", folder, "--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "6"]
    monkeypatch.setattr(sys, "argv", [*args, "--steps", "1", "--width", "2", "--json", str(state)])
    search = script("search_layers")
    assert search.main() == 0
    out = capsys.readouterr().out
    assert "best: " in out and "drafting with it" in out
    measured = json.loads(state.read_text())["measured"]
    whole = next(entry for entry in measured if not entry["left_out"])
    assert whole["alpha"] == 1.0 and whole["c"] == 1.0 and whole["speedup_at_k1"] == 1.0
    assert all(entry["c"] < 1 for entry in measured if entry["left_out"])

    def never(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(search, "run_layers", never)
    assert search.main() == 0 and capsys.readouterr().out.splitlines()[-2] == out.splitlines()[-2]


def test_two_tokenizers_are_refused(capsys, folder, other_tokenizer):
    args = ("--model", folder, "--prompt", "a", "--drafter", "model", "--draft-model", other_tokenizer)
    code, _, err = run(capsys, *args)
    assert code == 2 and "tokenizer" in err


@pytest.mark.slow  # compiles four searches
def test_beams_are_printed_with_scores_and_compared_with_a_search_without_a_draft(capsys, folder):
    flags = "--num-beams 3 --num-return-sequences 2 --num-draft-beams 5 --early-stopping never --drafter model".split()
    args = ("--model", folder, "--prompt", "abc", "--prompt", "xyz", "--draft-model", folder, *flags)
    code, out, err = run(capsys, *args, "--compare")
    lines = out.splitlines()
    assert code == 0, err
    assert [lines[0], lines[3]] == ["--- abc", "--- xyz"]
    scores = [float(lines[i].split()[0]) for i in (1, 2, 4, 5)]
    assert scores[0] >= scores[1] and scores[2] >= scores[3] and "(length): " in lines[1]
    assert lines[-2] == "24 steps in 4 target calls (6.00 a call)"  # the draft is the target
    assert lines[-1] == "without a draft: 24 steps in 24 target calls (1.00 a call); identical texts"


@pytest.mark.parametrize("flags, message", [
    (["--trace"], "--trace can't go with --num-beams"),
    (["--json"], "--json can't go with --num-beams"),
    (["--num-speculative-tokens", "3"], "--drafter none drafts nothing"),
])  # fmt: skip
def test_flags_that_beams_can_not_use_are_refused(capsys, flags, message):
    with pytest.raises(SystemExit):
        run(capsys, "--model", "x", "--num-beams", "3", *flags)
    assert message in capsys.readouterr().err
