"""Llama logits against transformers and against the NumPy oracle, whole and through the cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import torch
import transformers

from convert import llama_weights as convert
from specjax.models import cache as kv
from specjax.models import modules
from specjax.models.config import from_hf
from specjax.models.llama import Layer, Llama
from specjax.models.lm import LM

BASE = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS = {
    "llama1": {"rms_norm_eps": 1e-6},
    "llama2": {"num_key_value_heads": 4, "rope_scaling": None, "pretraining_tp": 1},
    "llama3": {"num_key_value_heads": 2, "rope_theta": 500000.0},
    "rope_llama3": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}, "rope_theta": 10000.0},
    "rope_llama3_factor32": {"rope_scaling": LLAMA3 | {"factor": 32.0}, "rope_theta": 500000.0},
    "rope_linear": {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "rope_yarn": {"rope_scaling": YARN},
    "rope_yarn_untruncated": {"rope_scaling": YARN | {"truncate": False, "beta_fast": 8.0, "beta_slow": 2.0}},
    "rope_yarn_mscale": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "rope_yarn_attention_factor": {"rope_scaling": YARN | {"attention_factor": 1.4}},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "explicit_head_dim": {"hidden_size": 48, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16},
    "head_dim_null": {"hidden_size": 48, "head_dim": None},
    "heads_8_2": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "heads_6_3": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    "one_layer": {"num_hidden_layers": 1},
    "four_layers": {"num_hidden_layers": 4, "num_key_value_heads": 2},
}
each_variant = pytest.mark.parametrize("name", VARIANTS)
TOKENS = np.random.default_rng(7).integers(0, BASE["vocab_size"], (2, 40), dtype=np.int32)
OTHERS = (TOKENS[:, ::-1] + 1) % BASE["vocab_size"]  # what a rejected draft might have held


@functools.cache
def checkpoint(name, dtype="float32"):
    """(config dict, tensors by Hugging Face name, LM) of a random model."""
    config = BASE | VARIANTS[name]
    tensors = {n: t.astype(jnp.dtype(dtype)) for n, t in oracle.random_tensors(config, seed=len(name)).items()}
    parsed = from_hf(config)
    return config, tensors, LM(parsed, convert.from_hf_tensors(parsed, tensors.items()))


@functools.partial(jax.jit, static_argnames="with_logits")
def call(lm, *args, with_logits=True):
    return lm(*args, with_logits=with_logits)


def feed(lm, tokens, cache):
    """Logits [B, T, V] and the cache with the block committed."""
    out = call(lm, tokens, cache)
    return out.logits, kv.with_lengths(out.cache, cache.lengths + tokens.shape[1])


def prefill(lm, tokens):
    """:func:`feed` on an empty cache. Its capacity is the same for all, so that few shapes are compiled."""
    return feed(lm, tokens, lm.alloc_cache(len(tokens), TOKENS.shape[1]))


@functools.cache
def transformers_logits(name, dtype="float32"):
    config, tensors, _ = checkpoint(name, dtype)

    class Config(transformers.LlamaConfig):
        def validate_architecture(self):  # it refuses hidden % heads although the model only uses head_dim
            pass

    # A copy per nested dict: transformers completes the rope dicts in place.
    kwargs = {k: dict(v) if isinstance(v, dict) else v for k, v in config.items() if k != "model_type"}
    model = transformers.LlamaForCausalLM._from_config(
        Config(**kwargs), attn_implementation="eager", dtype=getattr(torch, dtype)
    ).eval()
    state = {n: torch.tensor(t.astype(np.float32)).to(getattr(torch, dtype)) for n, t in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if config.get("tie_word_embeddings") else set())
    with torch.no_grad():
        return model(torch.tensor(TOKENS).long()).logits.float().numpy()


def oracle_logits(name, tokens, dtype="float32"):
    config, tensors, _ = checkpoint(name, dtype)
    return np.stack([oracle.forward(tensors, config, row) for row in tokens])


@each_variant
def test_prefill_equals_transformers_and_oracle(name):
    logits, _ = prefill(checkpoint(name)[2], TOKENS)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, oracle_logits(name, TOKENS), atol=2e-4, rtol=0)
    np.testing.assert_allclose(logits, transformers_logits(name), atol=2e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama3", "biases"])
def test_half_precision_is_no_further_from_the_truth_than_transformers(name, dtype):
    lm = checkpoint(name, dtype)[2]
    logits, cache = prefill(lm, TOKENS)
    assert {leaf.dtype for leaf in jax.tree.leaves((lm.params, cache.keys, cache.values))} == {jnp.dtype(dtype)}
    truth = oracle_logits(name, TOKENS, dtype)
    ours, theirs = (np.sqrt(((x - truth) ** 2).mean()) for x in (logits, transformers_logits(name, dtype)))
    assert ours < 1.2 * theirs


@pytest.mark.parametrize("name", ["llama3", "rope_yarn", "explicit_head_dim"])
def test_ragged_blocks_through_the_cache(name):
    """Two rows of different lengths, fed together in blocks, see what each would have seen alone."""
    lm, lengths = checkpoint(name)[2], np.array([3, 11])
    expected = oracle_logits(name, TOKENS)
    stale = np.arange(TOKENS.shape[1]) >= lengths[:, None]
    _, cache = prefill(lm, np.where(stale, OTHERS, TOKENS))
    cache = kv.with_lengths(cache, jnp.array(lengths))
    for block in (1, 3, 2, 1):
        rows = np.arange(2)[:, None], lengths[:, None] + np.arange(block)
        logits, cache = feed(lm, TOKENS[rows], cache)
        np.testing.assert_allclose(logits, expected[rows], atol=2e-4, rtol=0)
        lengths = lengths + block
        assert cache.lengths.tolist() == lengths.tolist()


@pytest.mark.parametrize("prompt", [1, 2, 17])
def test_positions_follow_a_prompt_of_any_length(prompt):
    lm, expected = checkpoint("llama3")[2], oracle_logits("llama3", TOKENS)
    _, cache = prefill(lm, TOKENS[:, :prompt])
    at = prompt
    for block in (1, 3, 2, 3):
        logits, cache = feed(lm, TOKENS[:, at : at + block], cache)
        np.testing.assert_allclose(logits, expected[:, at : at + block], atol=2e-4, rtol=0)
        at += block


@pytest.mark.parametrize("name", ["one_layer", "four_layers"])
def test_rollback_equals_a_fresh_prefill(name):
    """Rejected tokens leave stale entries in every layer; whatever those hold, what follows doesn't see them."""
    lm, kept, capacity = checkpoint(name)[2], np.array([6, 9]), TOKENS.shape[1]
    _, cache = prefill(lm, TOKENS)
    before = [x.shape for x in jax.tree.leaves(cache)]
    stale = np.arange(capacity) >= kept[:, None]  # [B, S]
    filled = jax.tree.map(lambda x: np.where(stale[:, None, :, None], np.float32(1e4), x), (cache.keys, cache.values))
    cache = jax.tree.map(jnp.asarray, kv.KVCache(*filled, kept.astype(np.int32)))
    logits, cache = feed(lm, OTHERS[:, :6], cache)
    fresh = TOKENS.copy()
    for row, length in enumerate(kept):
        fresh[row, length : length + 6] = OTHERS[row, :6]
    alone, _ = prefill(lm, fresh)
    for row, length in enumerate(kept):
        # Two programs, so they round apart; a single stale entry would be far outside.
        np.testing.assert_allclose(logits[row], alone[row, length : length + 6], atol=1e-4, rtol=0)
    assert [x.shape for x in jax.tree.leaves(cache)] == before
    compiled = call._cache_size()
    feed(lm, OTHERS[:, :6], kv.with_lengths(cache, jnp.array(kept - 1, jnp.int32)))
    assert call._cache_size() == compiled, "another length must not compile again"


def test_the_first_token_of_an_empty_row_sees_only_itself():
    lm = checkpoint("llama3")[2]
    full = jax.tree.map(lambda x: np.full(x.shape, 1e4, x.dtype), lm.alloc_cache(2, TOKENS.shape[1]))
    logits, _ = feed(lm, TOKENS[:, :1], full.replace(lengths=jnp.zeros(2, jnp.int32)))
    np.testing.assert_allclose(logits, oracle_logits("llama3", TOKENS)[:, :1], atol=2e-4, rtol=0)


def test_explicit_positions_and_mask_select_a_branch():
    """Two siblings in one block: same position, neither sees the other. What a tree of drafts needs."""
    lm = checkpoint("llama3")[2]
    _, cache = prefill(lm, TOKENS)
    siblings = np.array([[3, 58], [20, 4]], np.int32)
    mask = np.zeros((2, 2, TOKENS.shape[1]), bool)
    mask[:, :, :5] = mask[:, 0, 5] = mask[:, 1, 6] = True
    cache = kv.with_lengths(cache, jnp.full(2, 5, jnp.int32))
    logits = call(lm, siblings, cache, np.full((2, 2), 5, np.int32), mask).logits
    for i in range(2):
        alone = oracle_logits("llama3", np.append(TOKENS[:, :5], siblings[:, i : i + 1], 1))
        np.testing.assert_allclose(logits[:, i], alone[:, -1], atol=2e-4, rtol=0)


def test_a_tied_head_is_stored_once():
    config, tensors, lm = checkpoint("tied")
    assert "lm_head.weight" not in tensors and "lm_head" not in lm.params
    logits, _ = prefill(lm, TOKENS)
    hidden = call(lm, TOKENS, lm.alloc_cache(2, 40), with_logits=False)
    assert hidden.logits.shape[-1] == 0
    expected = np.asarray(hidden.hidden) @ tensors["model.embed_tokens.weight"].T
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["rope_llama3", "rope_llama3_factor32", "rope_yarn"])
def test_scaled_rope_is_right_far_from_the_start(name):
    """The first differences appear at long range, so a few tokens are set at positions up to 1000."""
    config, tensors, lm = checkpoint(name)
    positions = np.array([[0, 100, 1000]], np.int32)
    logits = call(lm, TOKENS[:1, :3], lm.alloc_cache(1, 3), positions).logits
    expected = oracle.forward(tensors, config, TOKENS[0, :3], positions[0])
    np.testing.assert_allclose(logits[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_head_rows_tie_exactly_in_every_block_shape(dtype):
    """Greedy ties go to the lowest id only if equal rows give equal bits, wherever they lie in the vocabulary.

    The vocabulary is a multiple of 8: XLA's CPU backend rounds the tail past one differently in a one-row product.
    """
    config = from_hf(BASE | {"vocab_size": 64})
    tensors = oracle.random_tensors(BASE | {"vocab_size": 64})
    tensors["lm_head.weight"][[17, 60, 63]] = tensors["lm_head.weight"][2]
    lm = LM(config, convert.from_hf_tensors(config, tensors.items(), dtype=jnp.dtype(dtype)))
    for batch, block in ((1, 1), (2, 1), (1, 6)):
        logits, _ = prefill(lm, TOKENS[:batch, :block])
        assert (logits[..., [17, 60, 63]] == logits[..., [2]]).all(), (batch, block)


@each_variant
def test_export_is_bit_equal(name):
    _, tensors, lm = checkpoint(name)
    back = convert.to_hf(lm.config, lm.params)
    assert back.keys() == tensors.keys()
    assert all((back[n] == t).all() and back[n].dtype == t.dtype for n, t in tensors.items())


def test_dtype_on_request():
    config, tensors, lm = checkpoint("biases")
    params = convert.from_hf_tensors(lm.config, tensors.items(), dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("name", ["biases", "tied", "heads_6_3"])
def test_every_tensor_matters(name):
    """Guards the tests above: were some weight ignored by both sides, they would agree and be wrong."""
    lm = checkpoint(name)[2]
    logits, _ = prefill(lm, TOKENS)
    leaves, tree = jax.tree.flatten(lm.params)
    for i, leaf in enumerate(leaves):
        noise = np.random.default_rng(i).standard_normal(leaf.shape, dtype=np.float32)
        bent = jax.tree.unflatten(tree, [*leaves[:i], np.asarray(leaf) + np.float32(0.1) * noise, *leaves[i + 1 :]])
        moved, _ = prefill(LM(lm.config, bent), TOKENS)
        assert np.abs(moved - logits).max() > 1e-2, jax.tree_util.tree_leaves_with_path(lm.params)[i][0]


def test_layers_of_one_shape_are_traced_once(monkeypatch):
    """A model's start is mostly tracing otherwise. Layers that run other parts have traces of their own."""
    _, _, lm = checkpoint("four_layers")
    traced = []
    whole = Layer.__call__
    monkeypatch.setattr(Layer, "__call__", lambda self, *args: traced.append(args[-1]) or whole(self, *args))
    both, attention, neither = (True, True), (True, False), (False, False)
    for run, expected in ((None, [both]), ((both, attention, both, neither), [both, attention, neither])):
        traced.clear()
        jax.eval_shape(lambda lm, run=run: lm(jnp.zeros((1, 3), jnp.int32), lm.alloc_cache(1, 8), run=run), lm)
        assert traced == expected


def test_a_models_structure_does_not_draw_weights(monkeypatch):
    monkeypatch.setattr(modules.nnx, "Rngs", None)
    _, shapes = modules.structure.__wrapped__(Llama, from_hf(BASE))
    assert shapes["embed"].shape == (BASE["vocab_size"], BASE["hidden_size"])
