"""Llama's relatives and GPT-2 against transformers: logits whole and through the cache, greedy texts, and files."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
import relatives
from relatives import CONFIGS, ONE_OF_EACH
from round_trips import check_converted, check_documented, check_round_trip

import specjax
from convert import llama_weights as weights
from specjax import testing
from specjax.drafters import DraftModel, PromptLookup, TreeModel
from specjax.models import cache as kv

TOKENS = np.random.default_rng(7).integers(0, 61, (2, 40), dtype=np.int32)
OTHERS = (TOKENS[:, ::-1] + 1) % 61  # what a rejected draft might have held
PROMPTS = [TOKENS[0, :9].tolist(), TOKENS[1, :3].tolist()]
DEFAULT = {*ONE_OF_EACH, "smollm3 window", "gemma2 tight caps", "llama dynamic"}


def slow_unless(default, names=tuple(CONFIGS)):
    return [pytest.param(name, marks=() if name in default else pytest.mark.slow) for name in names]


@jax.jit
def call(lm, tokens, cache):
    return lm(tokens, cache)


@pytest.mark.parametrize("name", slow_unless(DEFAULT))
def test_logits_are_those_of_transformers(name):
    """A whole text, and two rows of different lengths in blocks on top of a cache, beyond every window."""
    lm, expected = specjax.load(relatives.folder(name), dtype="float32"), relatives.logits(name, TOKENS)
    out = call(lm, TOKENS, lm.alloc_cache(2, 40))
    np.testing.assert_allclose(out.logits, expected, atol=2e-4, rtol=0)

    lengths = np.array([2, 11])
    stale = np.arange(40) >= lengths[:, None]
    cache = call(lm, np.where(stale, OTHERS, TOKENS), lm.alloc_cache(2, 40)).cache
    for _ in range(4):
        rows = np.arange(2)[:, None], lengths[:, None] + np.arange(3)
        out = call(lm, TOKENS[rows], kv.with_lengths(cache, jnp.array(lengths)))
        np.testing.assert_allclose(out.logits, expected[rows], atol=2e-4, rtol=0)
        cache, lengths = out.cache, lengths + 3


DRAFTERS = {
    "draft model": DraftModel,
    "prompt lookup": lambda twin: PromptLookup(prompt_lookup_min=1),
    "tree": lambda twin: TreeModel(twin, (3, 2, 1)),
}
SEEN = {("gemma3 two bases", "tree")}


@pytest.mark.parametrize(
    "name, drafter",
    [
        pytest.param(n, d, marks=() if (n, d) in SEEN else pytest.mark.slow, id=f"{n}-{d}")
        for n in ONE_OF_EACH
        for d in DRAFTERS
    ],
)
def test_greedy_speculation_is_transformers_greedy_text(name, drafter):
    lm = specjax.load(relatives.folder(name), dtype="float32")
    made = DRAFTERS[drafter](testing.noisy_twin(lm, 0.02))
    out = specjax.generate(lm, PROMPTS, drafter=made, num_speculative_tokens=3, max_new_tokens=20)
    assert out.tokens == [relatives.greedy(name, prompt, 20) for prompt in PROMPTS]
    assert sum(m.num_accepted_tokens for m in out.metrics) > 0


def test_the_documents_table_has_every_configuration():
    check_documented(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_and_tensors_survive_a_round_trip(name):
    check_round_trip(relatives.folder(name), relatives.model(name))


@pytest.mark.parametrize("name", slow_unless({"gpt2"}, ONE_OF_EACH))
def test_converted_and_eight_bit_folders_give_the_same_model(name, tmp_path):
    models = check_converted(relatives.folder(name), tmp_path)
    exact, rounded = (call(model, TOKENS, model.alloc_cache(2, 40)).logits for model in models)
    assert 0 < np.abs(exact - rounded).max() < 0.25 * np.abs(exact).max()


def test_an_old_gpt2_file_has_no_prefix_and_keeps_the_causal_mask():
    lm = specjax.load(relatives.folder("gpt2"))
    tensors = weights.to_hf(lm.config, lm.params)
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    kept = [f"h.{i}.attn.{name}" for i in range(3) for name in ("bias", "masked_bias")]
    masks = dict.fromkeys(kept, np.ones((1, 1, 64, 64), np.float32))
    head = {"lm_head.weight": tensors["transformer.wte.weight"]}
    again = weights.from_hf_tensors(lm.config, {**old, **masks, **head}.items())
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again, lm.params))
    with pytest.raises(ValueError, match="missing: transformer.h.0.attn.c_attn.weight .32, 96."):
        weights.check(lm.config, ((n, t.shape) for n, t in old.items() if n != "h.0.attn.c_attn.weight"))


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_embeddings_are_what_the_first_layer_reads(name):
    lm = specjax.load(relatives.folder(name), dtype="float32")
    first = lm(TOKENS, lm.alloc_cache(2, 40), taps=(0,), with_logits=False).taps[0]
    places = lm.params["position_embed"][:40] if name == "gpt2" else 0
    np.testing.assert_allclose(lm.embed(TOKENS) + places, first, rtol=1e-6)
    embedded = lm(None, lm.alloc_cache(2, 40), embedded=lm.embed(TOKENS), taps=(0,), with_logits=False).taps[0]
    np.testing.assert_allclose(embedded, first, rtol=1e-6)


def test_a_context_of_dynamic_rope_ends_where_its_frequencies_would_change():
    lm = specjax.load(relatives.folder("llama dynamic"))
    assert lm.max_positions == 64
    with pytest.raises(ValueError, match="65 tokens, more than the model's context of 64"):
        specjax.generate(lm, [[1] * 65], max_new_tokens=1)


@pytest.mark.parametrize("name", slow_unless({"gemma2"}, ONE_OF_EACH))
def test_every_tensor_matters(name):
    """Guards the tests above: were some weight ignored by both sides, they would agree and be wrong."""
    lm = specjax.load(relatives.folder(name), dtype="float32")
    logits = call(lm, TOKENS, lm.alloc_cache(2, 40)).logits
    leaves, tree = jax.tree.flatten(lm.params)
    for i, leaf in enumerate(leaves):
        noise = np.random.default_rng(i).standard_normal(leaf.shape, dtype=np.float32)
        bent = jax.tree.unflatten(tree, [*leaves[:i], leaf + np.float32(0.1) * noise, *leaves[i + 1 :]])
        moved = call(specjax.LM(lm.config, bent), TOKENS, lm.alloc_cache(2, 40)).logits
        assert np.abs(moved - logits).max() > 1e-3, jax.tree_util.tree_leaves_with_path(lm.params)[i][0]
