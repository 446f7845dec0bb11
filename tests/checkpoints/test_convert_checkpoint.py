"""specjax's own folders, the conversion script, and how much memory a conversion takes."""

import io
import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import ROOT
from conversions import MEASURE, run_script
from hf_folders import HF, random_tensors, write_hf
from small_tokenizers import byte_level

from convert import checkpoint
from convert import llama_weights as convert_llama
from convert.source import open_source
from specjax.models.config import from_hf


def test_round_trip(tmp_path):
    tensors = write_hf(tmp_path / "hf", tokenizer=byte_level())
    source = open_source(tmp_path / "hf")
    checkpoint.save(tmp_path / "own", source.config, source.fill(), source.tokenizer)
    shutil.rmtree(tmp_path / "hf")
    config, params, tokenizer = checkpoint.restore(tmp_path / "own")
    assert config == from_hf(HF) and tokenizer.encode("ab") == byte_level().encode("ab")
    back = convert_llama.to_hf(config, params)
    assert all(back[name].tobytes() == array.tobytes() for name, array in tensors.items())
    _, rounded, _ = checkpoint.restore(tmp_path / "own", jnp.bfloat16)
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and (a == b).all(), rounded, expected))


def test_folders_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    config = from_hf(HF)
    params = convert_llama.from_hf_tensors(config, random_tensors(config).items())
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="taken exists already"):
        checkpoint.save(tmp_path / "taken", config, params)
    with monkeypatch.context() as patch:
        patch.setattr(type(config), "to_dict", lambda self: 1 / 0)  # fails after the weights are written
        with pytest.raises(ZeroDivisionError):
            checkpoint.save(tmp_path / "new", config, params)
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_unsound_folders_are_refused(tmp_path):
    config = from_hf(HF)
    own = tmp_path / "own"
    checkpoint.save(own, config, convert_llama.from_hf_tensors(config, random_tensors(config).items()))
    head = json.loads((own / "specjax.json").read_text())

    def refused(words, **changes):
        (own / "specjax.json").write_text(json.dumps({**head, **changes}))
        with pytest.raises(ValueError, match=words):
            checkpoint.restore(own)

    refused("format 9", format=9)
    refused("norm", config={**head["config"], "hidden_size": 40})
    refused("layers.*absent", config={**head["config"], "num_hidden_layers": 3})
    refused("lm_head.*expected nothing", config={**head["config"], "tie_word_embeddings": True})
    refused("unexpected keyword", config={**head["config"], "other": 3})
    (own / "specjax.json").write_text(json.dumps(head))
    for file in (own / "params").rglob("*"):
        if file.is_file() and file.stat().st_size > 10_000:
            file.write_bytes(file.read_bytes()[:5_000])
    with pytest.raises(ValueError, match="can't be restored"):
        checkpoint.restore(own)
    shutil.rmtree(own / "params")
    with pytest.raises(ValueError, match="can't be restored"):
        checkpoint.restore(own)
    (own / "specjax.json").unlink()
    with pytest.raises(ValueError, match="specjax.json"):
        checkpoint.restore(own)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_at_a_terminal_alone(tmp_path, monkeypatch, capsys):
    write_hf(tmp_path / "hf", tokenizer=byte_level())
    assert run_script(tmp_path / "hf", tmp_path / "own") == 0
    written = capsys.readouterr()
    assert written.err == "" and "tensors" not in written.out
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert run_script(tmp_path / "hf", tmp_path / "again") == 0
    assert "reading: 100%" in sys.stderr.getvalue() and "21/21" in sys.stderr.getvalue()
    sys.stderr = Terminal()
    open_source(tmp_path / "hf").fill()
    assert sys.stderr.getvalue() == ""


def test_script(tmp_path):
    tensors = write_hf(tmp_path / "hf", tokenizer=byte_level())
    assert run_script(tmp_path / "hf", tmp_path / "own") == 0
    assert run_script(tmp_path / "own", tmp_path / "half", "--dtype", "float16") == 0
    config, params, _ = checkpoint.restore(tmp_path / "half")
    back = convert_llama.to_hf(config, params)
    assert all((back[name] == array.astype(np.float16)).all() for name, array in tensors.items())


def test_script_refuses_in_one_sentence(tmp_path, capsys):
    write_hf(tmp_path / "hf", **{"model.norm.weight": np.full(32, np.nan, np.float32)})
    write_hf(tmp_path / "cut")
    cut = tmp_path / "cut" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    refusals = {"hf": "not finite: model.norm.weight", "cut": "it is cut short", "none": "neither a file"}
    for source, words in refusals.items():
        assert run_script(tmp_path / source, tmp_path / "own") == 2
        error = capsys.readouterr().err
        assert words in error and error.startswith("error: ") and "Traceback" not in error
        assert not (tmp_path / "own").exists()
    assert run_script(tmp_path / "hf", tmp_path / "cut") == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_conversion_takes_the_model_and_one_tensor(tmp_path):
    write_hf(tmp_path / "small")
    large = {**HF, "vocab_size": 12_000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    tensors = write_hf(tmp_path / "large", large)
    model, largest = sum(a.nbytes for a in tensors.values()), max(a.nbytes for a in tensors.values())
    del tensors
    command = [sys.executable, "-c", MEASURE, tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert int(run.stdout) < model + largest, (int(run.stdout) / 1e6, model / 1e6, largest / 1e6)
