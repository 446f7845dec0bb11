"""The table of tensors, and configs: converted weights against an independent NumPy forward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_folders import TINY, random_tensors

from convert import llama_weights as convert_llama
from specjax.models import llama, rope
from specjax.models.config import LlamaConfig, from_hf
from specjax.models.lm import LM


def numpy_logits(config, tensors, tokens, positions, inv_freq):
    """Llama in float64 NumPy from Hugging Face's tensors: no fused weights, no cache, rotate-half."""
    c, t = config, {k: np.asarray(v, np.float64) for k, v in tensors.items()}

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps) * t[name + ".weight"]

    def linear(x, name):
        return x @ t[name + ".weight"].T + t.get(name + ".bias", 0.0)

    angle = np.tile(positions[:, None] * inv_freq, 2)  # [T, D]

    def heads(x, count):
        x = x.reshape(len(tokens), count, c.head_dim)
        half = c.head_dim // 2
        turned = np.concatenate([-x[..., half:], x[..., :half]], -1)
        return x, x * np.cos(angle)[:, None] + turned * np.sin(angle)[:, None]

    x = t["model.embed_tokens.weight"][tokens]
    for i in range(c.num_hidden_layers):
        at = f"model.layers.{i}"
        h = norm(x, f"{at}.input_layernorm")
        q = heads(linear(h, f"{at}.self_attn.q_proj"), c.num_attention_heads)[1]
        k = heads(linear(h, f"{at}.self_attn.k_proj"), c.num_key_value_heads)[1]
        v = heads(linear(h, f"{at}.self_attn.v_proj"), c.num_key_value_heads)[0]
        out = np.zeros_like(q)
        for head in range(c.num_attention_heads):
            kv = head // c.group_size
            scores = q[:, head] @ k[:, kv].T / np.sqrt(c.head_dim)
            scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, kv]
        x = x + linear(out.reshape(len(tokens), -1), f"{at}.self_attn.o_proj")
        h = norm(x, f"{at}.post_attention_layernorm")
        gate = linear(h, f"{at}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    head = t["model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"]
    return norm(x, "model.norm") @ head.T


def assert_forward_matches(config, start=0, inv_freq=None):
    tensors = random_tensors(config)
    params = convert_llama.from_hf_tensors(config, tensors.items())
    tokens = np.arange(7) * 5 % config.vocab_size
    positions = start + np.arange(7)
    lm = LM(config, params)
    run = jax.jit(lambda lm, cache: lm(tokens[None], cache, jnp.asarray(positions)[None]).logits[0])
    got = run(lm, lm.alloc_cache(1, 8))
    if inv_freq is None:
        inv_freq = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    np.testing.assert_allclose(got, numpy_logits(config, tensors, tokens, positions, inv_freq), atol=1e-4)


def test_tied_head_needs_no_lm_head():
    config = from_hf({**TINY, "tie_word_embeddings": True})
    assert_forward_matches(config)
    tensors = random_tensors(config)
    assert "lm_head.weight" not in tensors
    equal = {"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors}  # as some writers do
    params = convert_llama.from_hf_tensors(config, equal.items())
    assert "lm_head" not in params and jax.tree.structure(params) == jax.tree.structure(llama.structure(config)[1])
    other = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        convert_llama.from_hf_tensors(config, other.items())
    with pytest.raises(ValueError, match="missing: lm_head.weight"):
        convert_llama.from_hf_tensors(from_hf(TINY), tensors.items())


@pytest.mark.parametrize("position", [0, 100, 1000])
def test_llama3_rope_scaling_is_that_of_an_independent_forward(position):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 128}  # fmt: skip
    config = from_hf({**TINY, "head_dim": 8, "rope_theta": 10000.0, "rope_scaling": scaling})
    expected = np.array([1, 0.0427512, 0.00125, 0.000125])
    np.testing.assert_allclose(rope.inverse_frequencies(config)[0], expected, rtol=2e-6)
    assert_forward_matches(config, position, rope.inverse_frequencies(config)[0].astype(np.float64))
    config = from_hf({**TINY, "head_dim": 8, "rope_scaling": {**scaling, "factor": 32.0}})
    np.testing.assert_allclose(rope.inverse_frequencies(config)[0][2:], [0.01 / 32, 0.001 / 32], rtol=1e-6)


def test_rope_theta_is_read_in_either_place():
    inside = {"rope_type": "default", "rope_theta": 500000.0}
    assert from_hf({**TINY, "rope_theta": 500000.0}).rope_theta == 500000.0
    assert from_hf({**TINY, "rope_parameters": inside}).rope_theta == 500000.0
    assert from_hf(TINY).rope_theta == 10000.0
    with pytest.raises(ValueError, match="twice"):
        from_hf({**TINY, "rope_theta": 10000.0, "rope_parameters": inside})


def test_an_explicit_head_dim_gives_the_right_logits():
    odd = {**TINY, "hidden_size": 48, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16}
    assert_forward_matches(from_hf(odd))
    plain = {**TINY, "hidden_size": 48, "head_dim": None}
    assert from_hf(plain).head_dim == 12
    assert_forward_matches(from_hf(plain))
    with pytest.raises(ValueError, match="head_dim"):
        from_hf({**TINY, "hidden_size": 50})


@pytest.mark.parametrize("heads, kv", [(8, 2), (6, 3)])
@pytest.mark.parametrize("biases", [False, True])
def test_grouped_query_heads_load_and_export_in_the_right_order(heads, kv, biases):
    config = from_hf({**TINY, "hidden_size": heads * 8, "num_attention_heads": heads, "num_key_value_heads": kv,
                      "attention_bias": biases, "mlp_bias": biases})  # fmt: skip
    assert_forward_matches(config)
    for dtype in (np.float32, np.float16, jnp.bfloat16):
        tensors = random_tensors(config, dtype=dtype)
        back = convert_llama.to_hf(config, convert_llama.from_hf_tensors(config, tensors.items()))
        assert back.keys() == tensors.keys()
        for name, array in tensors.items():
            assert back[name].dtype == array.dtype and back[name].tobytes() == array.tobytes(), name


def test_names_and_shapes_are_strict():
    config = from_hf(TINY)
    tensors = random_tensors(config)
    bare = {k.removeprefix("model."): v for k, v in tensors.items()}
    inv = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    for accepted in (bare, {**tensors, **inv}, dict(reversed(tensors.items()))):
        params = convert_llama.from_hf_tensors(config, accepted.items())
        assert (convert_llama.to_hf(config, params)["model.norm.weight"] == tensors["model.norm.weight"]).all()

    bad = dict(tensors)
    bad["model.layers.0.mlp.gate.weight"] = bad.pop("model.layers.0.mlp.gate_proj.weight")
    bad["model.layers.1.self_attn.k_proj.weight"] = np.zeros((3, 32), np.float32)
    bad["norm.weight"] = bad["model.norm.weight"]
    for act in (lambda: convert_llama.from_hf_tensors(config, bad.items()),
                lambda: convert_llama.check(config, ((k, v.shape) for k, v in bad.items()))):  # fmt: skip
        with pytest.raises(ValueError) as error:
            act()
        for line in ("unexpected: model.layers.0.mlp.gate.weight [40, 32]", "duplicate: norm.weight",
                     "missing: model.layers.0.mlp.gate_proj.weight [40, 32]",
                     "misshapen: model.layers.1.self_attn.k_proj.weight is [3, 32], expected [16, 32]"):  # fmt: skip
            assert line in str(error.value)
    deeper = LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 3})
    with pytest.raises(ValueError, match="missing: model.layers.2"):
        convert_llama.from_hf_tensors(deeper, tensors.items())


@pytest.mark.parametrize("value, dtype", [(np.nan, None), (np.inf, None), (1e6, "float16")])
def test_values_must_be_finite(value, dtype):
    config = from_hf(TINY)
    tensors = random_tensors(config)
    tensors["model.layers.1.self_attn.v_proj.weight"][3, 4] = value
    with pytest.raises(ValueError, match="not finite: model.layers.1.self_attn.v_proj.weight"):
        convert_llama.from_hf_tensors(config, tensors.items(), dtype)


def test_mixed_and_quantised_dtypes():
    config = from_hf(TINY)
    tensors = random_tensors(config, dtype=jnp.bfloat16)
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name].astype(np.float32) + np.float32(1e-5)
    params = convert_llama.from_hf_tensors(config, tensors.items())
    assert params["layers"]["0"]["attention"]["qkv"]["weight"].dtype == jnp.float32  # nothing rounded
    assert (convert_llama.to_hf(config, params)[name] == tensors[name]).all()
    params = convert_llama.from_hf_tensors(config, tensors.items(), jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    tensors[name] = np.zeros(tensors[name].shape, np.int8)
    with pytest.raises(ValueError, match="not floating point: .*k_proj"):
        convert_llama.from_hf_tensors(config, tensors.items())
