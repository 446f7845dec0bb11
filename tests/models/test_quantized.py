"""Eight-bit weights and caches: how far codes are from what they stand for, and what stays exact all the same."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import ROOT
from conversions import MEASURE, run_script
from hf_folders import HF, write_hf

from convert import checkpoint
from convert import llama_weights as convert_llama
from specjax import generate, testing
from specjax.checkpoints.load import load
from specjax.drafters import DraftModel
from specjax.models import cache as kv
from specjax.models.llama import product
from specjax.models.quantized import KINDS, Quantized, dequantize, is_quantized, map_with_path, quantize

UNTIED = testing.tiny_lm(0)
TIED = testing.tiny_lm(1, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
each_kind = pytest.mark.parametrize("kind", KINDS)


@jax.jit
def call(lm, block, cache):
    out = lm(block, cache)
    return out.logits, kv.with_lengths(out.cache, cache.lengths + block.shape[1])


def equal(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(
        jax.tree.map(lambda x, y: x.dtype == y.dtype and x.tobytes() == y.tobytes(), *jax.device_get((a, b)))
    )


@each_kind
def test_error_of_each_value_is_bounded_by_its_channel(kind):
    x = jax.random.normal(jax.random.key(0), (3, 40, 64)) * 10.0 ** jnp.linspace(-20, 20, 40)[:, None]
    x = x.at[1, 7].set(0.0)
    q = quantize(x, kind)
    assert q.values.dtype == KINDS[kind][0] and q.values.shape == x.shape == q.shape
    assert q.scale.dtype == jnp.float32 and q.scale.shape == (3, 40)
    error, scale = np.abs(dequantize(q) - x), np.asarray(q.scale)[..., None]
    bound = scale / 2 if kind == "int8" else np.maximum(np.abs(x) / 16, scale / 1024)
    assert (error <= bound * (1 + 1e-5)).all()
    assert error.max(axis=-1).min() == error[1, 7].max() == 0.0, "a row of zeros stays one"
    peak = np.abs(np.asarray(q.values, np.float32)).max(axis=-1)
    assert (np.delete(peak.reshape(-1), 47) == KINDS[kind][1]).all(), "every channel uses the whole range"


@each_kind
@pytest.mark.parametrize("lm", [UNTIED, TIED], ids=["untied", "tied"])
def test_logits_are_those_of_the_model_that_the_codes_stand_for(lm, kind):
    small = lm.quantize(kind)
    left = {path for path, leaf in leaves(small) if not is_quantized(leaf)}
    assert {path[-2:] for path in left if path[-1] == "weight"} <= {
        (name, "weight") for name in ("norm", "attention_norm", "mlp_norm")
    }
    assert (("embed",) in left) == (lm is UNTIED), "a table that is no head is read a row a token, and stays exact"
    assert small.dtype == lm.dtype == jnp.float32 and small.alloc_cache(1, 8).keys[0].dtype == jnp.float32
    full = dataclasses.replace(small, params=map_with_path(lambda _, x: dequantize(x), small.params))
    for block in (1, 20):
        ids = np.arange(2 * block).reshape(2, block) % 50
        logits = call(small, ids, small.alloc_cache(2, 32))[0]
        np.testing.assert_allclose(logits, call(full, ids, full.alloc_cache(2, 32))[0], atol=2e-4, rtol=0)
    assert np.abs(logits - call(lm, ids, lm.alloc_cache(2, 32))[0]).max() > 1e-3, "quantised at all"


def leaves(lm):
    found = []
    map_with_path(lambda *item: found.append(item), lm.params)
    return found


def test_half_precision_stays_the_activations_dtype():
    lm = testing.tiny_lm(0, dtype=jnp.bfloat16).quantize("int8")
    assert lm.dtype == jnp.bfloat16
    out = jax.eval_shape(lambda: lm(jnp.zeros((1, 3), jnp.int32), lm.alloc_cache(1, 8)))
    assert out.hidden.dtype == out.cache.keys[0].dtype == jnp.bfloat16 and out.logits.dtype == jnp.float32


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_no_second_matrix_is_made(rows):
    weight = quantize(jax.random.normal(jax.random.key(0), (2, 1500, 256)), "int8")  # 1500 is no multiple of a block
    x = jax.random.normal(jax.random.key(1), (rows, 256))
    compiled = jax.jit(product, static_argnums=2).lower(x, weight, jnp.float32).compile()
    outputs = 4 * rows * 3000
    assert compiled.memory_analysis().temp_size_in_bytes < weight.values.nbytes / 4 + 3 * outputs
    np.testing.assert_allclose(compiled(x, weight), product(x, dequantize(weight), jnp.float32), atol=2e-3)


def tokens(lm, drafter=None):
    prompts = [[5], [3, 9], [4, 8, 1, 4, 8, 1, 30, 2, 7, 7, 7, 11, 6, 40, 41, 4, 8]]
    out = generate(lm, prompts, drafter=drafter, max_new_tokens=24, num_speculative_tokens=3)
    return out.tokens, np.mean([m.draft_acceptance_rate or 0.0 for m in out.metrics])


@pytest.mark.slow
def test_lossless_is_about_the_target_as_it_is_stored():
    """A quantised target has its own text, which drafters keep; a quantised draft leaves its target's text alone."""
    lm = testing.tiny_lm(0, num_hidden_layers=1)
    small, cached = lm.quantize("int8"), dataclasses.replace(lm, kv_dtype="int8")
    plain, own = tokens(lm)[0], tokens(small)[0]
    assert own != plain, "else this test shows nothing"
    assert tokens(small, "ngram")[0] == own
    drafted, rate = tokens(lm, DraftModel(lm.quantize("fp8")))
    assert drafted == plain and 0.5 < rate < 1.0
    assert tokens(cached, "ngram")[0] == tokens(cached)[0]


def test_load_and_convert_store_the_same_codes(tmp_path, capsys):
    write_hf(tmp_path / "hf", {**HF, "vocab_size": 2000})  # a folder's own files take 50 kB, more or less
    assert run_script(tmp_path / "hf", tmp_path / "own") == 0
    full = load(tmp_path / "hf", "bfloat16")
    for kind in KINDS:
        want = full.quantize(kind)
        assert equal(load(tmp_path / "hf", "bfloat16", quantize=kind).params, want.params)
        assert equal(load(tmp_path / "own", "bfloat16", quantize=kind).params, quantize_rounded(tmp_path, kind))
        arguments = ("--dtype", "bfloat16", "--quantize", kind)
        assert run_script(tmp_path / "hf", tmp_path / kind, *arguments) == 0
        assert f"bfloat16 and {kind}" in capsys.readouterr().out
        stored = load(tmp_path / kind, "bfloat16")
        assert equal(stored.params, want.params) and stored.dtype == jnp.bfloat16
        assert load(tmp_path / kind).dtype == jnp.float32, "dtype is of what isn't quantised"
    assert run_script(tmp_path / "own", tmp_path / "late", "--dtype", "bfloat16", "--quantize", "int8") == 0
    assert equal(load(tmp_path / "late", "bfloat16").params, full.quantize("int8").params)
    own, small = (sum(f.stat().st_size for f in (tmp_path / name).rglob("*")) for name in ("own", "int8"))
    assert small < 0.6 * own


def quantize_rounded(folder, kind):
    """As restored: the cast to bfloat16 comes first, then the codes."""
    return load(folder / "own", "bfloat16").quantize(kind).params


def test_what_cant_be_quantised_says_so(tmp_path, capsys):
    write_hf(tmp_path / "hf")
    lm = load(tmp_path / "hf", quantize="int8")
    checkpoint.save(tmp_path / "own", lm.config, lm.params)
    for name, value in (("quantize", "int4"), ("kv_dtype", "fp8")):
        with pytest.raises(ValueError, match=f"{name} must be .*'int8'.* got '{value}'"):
            load(tmp_path / "hf", **{name: value})
    with pytest.raises(ValueError, match="holds int8 weights, which can't be quantised again"):
        load(tmp_path / "own", quantize="fp8")
    with pytest.raises(ValueError, match="holds int8 weights"):
        lm.quantize("int8")
    with pytest.raises(ValueError, match="kind must be 'int8' or 'fp8', got None"):
        UNTIED.quantize(None)
    with pytest.raises(ValueError, match="without quantize"):
        convert_llama.to_hf(lm.config, lm.params)
    assert run_script(tmp_path / "own", tmp_path / "new", "--quantize", "int8") == 2
    assert "can't be quantised again" in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_quantising_never_holds_the_original(tmp_path):
    write_hf(tmp_path / "small")
    large = {**HF, "vocab_size": 8_000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12}
    tensors = write_hf(tmp_path / "large", large)
    model, largest = sum(a.nbytes for a in tensors.values()), max(a.nbytes for a in tensors.values())
    del tensors
    measure = MEASURE.replace("import sys\n", "import sys\nfrom specjax import parallel\n")
    measure = measure.replace("source.fill()", "source.fill(place=parallel.placement(source.config, quantize='int8'))")
    command = [sys.executable, "-c", measure, tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert int(run.stdout) < model / 4 + 4 * largest < 0.8 * model, (int(run.stdout) / 1e6, model / 1e6, largest / 1e6)


INT8_CACHE = dataclasses.replace(UNTIED, kv_dtype="int8")


def test_an_int8_cache_is_small_and_near():
    cache = INT8_CACHE.alloc_cache(2, 32)
    entry = sum(x.nbytes for x in jax.tree.leaves((cache.keys, cache.values))) / (2 * 2 * 32 * 2 * 2)
    assert entry == UNTIED.config.head_dim + 4, "a code a value, and a scale a head and token"
    ids = np.arange(40).reshape(2, 20) % 50
    exact = call(UNTIED, ids, UNTIED.alloc_cache(2, 32))[0]
    logits, cache = call(INT8_CACHE, ids, cache)
    assert cache.capacity == 32 and isinstance(cache.keys[0], Quantized)
    error = np.sqrt(np.mean((logits - exact) ** 2))
    assert 0 < error < 0.05 * np.std(exact)


def test_an_int8_cache_rolls_back():
    ids = np.arange(40).reshape(2, 20) % 50
    _, cache = call(INT8_CACHE, ids, INT8_CACHE.alloc_cache(2, 32))
    kept = jnp.array([6, 9], jnp.int32)
    again, _ = call(INT8_CACHE, ids[:, :6], kv.with_lengths(cache, kept))
    for row, length in enumerate(kept.tolist()):
        whole = np.concatenate([ids[row, :length], ids[row, :6]])[None]
        fresh = call(INT8_CACHE, np.repeat(whole, 2, 0), INT8_CACHE.alloc_cache(2, 32))[0]
        np.testing.assert_allclose(again[row], fresh[0, length:], atol=1e-3)
