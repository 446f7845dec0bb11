"""T5 against transformers: encoder, decoder and cache, greedy texts, files, and what is refused."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
import t5_folders
import torch
from round_trips import check_converted, check_documented, check_round_trip
from t5_folders import CONFIGS
from transformers.models.t5.modeling_t5 import T5Attention

import specjax
from specjax import testing
from specjax.decode import prefill
from specjax.drafters import DraftModel, FirstOf, LayerSkip, Lookahead, PromptLookup, TreeModel
from specjax.models import cache as kv
from specjax.models import t5

RNG = np.random.default_rng(7)
SOURCES = [RNG.integers(2, 61, 26).tolist(), RNG.integers(2, 61, 9).tolist()]
ENDS = np.array([26, 9])
TEXTS = RNG.integers(0, 61, (2, 24), dtype=np.int32)
TEXTS[:, 0] = 0
TOKENS = np.zeros((2, 52), np.int32)
for _row, (_source, _text) in enumerate(zip(SOURCES, TEXTS, strict=True)):
    TOKENS[_row, : len(_source) + 24] = [*_source, *_text]


def slow_unless(default, names=tuple(CONFIGS)):
    return [pytest.param(name, marks=() if name in default else pytest.mark.slow) for name in names]


@jax.jit
def read(lm, tokens, ends):
    return lm.read(tokens, lm.alloc_cache(*tokens.shape), ends)


@jax.jit
def call(lm, tokens, cache, lengths):
    return lm(tokens, kv.with_lengths(cache, lengths))


def logits_of(lm):
    return call(lm, TEXTS, read(lm, TOKENS, ENDS).cache, ENDS).logits


@pytest.mark.parametrize("name", slow_unless({"t5 1.1"}))
def test_states_and_logits_are_those_of_transformers(name):
    """Two sources of different lengths, whole texts, and texts in blocks on top of the cache."""
    lm = specjax.load(t5_folders.folder(name), dtype="float32")
    states, expected = t5_folders.outputs(name, SOURCES, TEXTS)
    out = read(lm, TOKENS, ENDS)  # what comes after a source does not count
    for row, state in enumerate(states):
        np.testing.assert_allclose(out.hidden[row, : ENDS[row]], state, atol=2e-4, rtol=0)
    np.testing.assert_allclose(call(lm, TEXTS, out.cache, ENDS).logits, expected, atol=2e-4, rtol=0)

    cache, done = out.cache, np.array([0, 0])
    for step in (5, 5, 5):
        rows = np.arange(2)[:, None], done[:, None] + np.arange(5)
        block = call(lm, TEXTS[rows], cache, ENDS + done)
        np.testing.assert_allclose(block.logits, expected[rows], atol=2e-4, rtol=0)
        cache, done = block.cache, done + [step, step - 2]  # the second row is rolled back


def test_distances_have_the_buckets_of_transformers():
    for count, most in ((32, 128), (8, 12), (4, 3), (64, 2000), (10, 77)):
        config = specjax.load(t5_folders.folder("t5")).config
        config = type(config).from_dict({**config.to_dict(), "num_buckets": count, "max_distance": most})
        distances = np.arange(-most, most + 1)
        for both_ways, after in ((True, distances), (False, -np.arange(most + 1))):
            theirs = T5Attention._relative_position_bucket(torch.tensor(after), both_ways, count, most).numpy()
            np.testing.assert_array_equal(t5.buckets(config, both_ways), theirs)


DRAFTERS = {
    "plain": lambda twin: None,
    "prompt lookup": lambda twin: PromptLookup(prompt_lookup_min=1),
    "draft model": DraftModel,
    "lookup, else the draft model": lambda twin: FirstOf(PromptLookup(prompt_lookup_min=1), DraftModel(twin)),
    "tree": lambda twin: TreeModel(twin, (3, 2, 1)),
    "sublayers": lambda twin: LayerSkip(skip_attention=(0,), skip_mlp=(1,)),
    "lookahead": lambda twin: Lookahead(window=2, guesses=2, slots=6),
}
DEFAULT = {("t5", "prompt lookup")}


@pytest.mark.parametrize(
    "name, drafter",
    [
        pytest.param(n, d, marks=() if (n, d) in DEFAULT else pytest.mark.slow, id=f"{n}-{d}")
        for n in ("t5", "t5 1.1")
        for d in DRAFTERS
    ],
)
def test_greedy_speculation_is_transformers_greedy_text(name, drafter):
    lm = specjax.load(t5_folders.folder(name), dtype="float32")
    made = DRAFTERS[drafter](testing.noisy_twin(lm, 0.02))
    out = specjax.generate(
        lm, SOURCES, drafter=made, num_speculative_tokens=3, max_new_tokens=20, ignore_eos=True
    )
    assert out.tokens == [t5_folders.greedy(name, source, 20) for source in SOURCES]
    assert out.prompt_tokens == [[*source, 0] for source in SOURCES]
    assert made is None or sum(m.num_accepted_tokens for m in out.metrics) > 0


@pytest.mark.slow
def test_a_smaller_t5_drafts():
    lm = specjax.load(t5_folders.folder("t5"), dtype="float32")
    draft = specjax.load(t5_folders.folder("t5 layers"), dtype="float32")
    options = dict(max_new_tokens=20, ignore_eos=True, temperature=1.0, seed=3)
    out = specjax.generate(lm, SOURCES, drafter=DraftModel(draft), verifier="coupled", **options)
    assert out.tokens == specjax.generate(lm, SOURCES, drafter=None, **options).tokens
    assert sum(m.num_draft_tokens for m in out.metrics) > 0


def test_prompt_lookup_copies_from_the_source():
    """The first text tokens are forced to be tokens of the source, and the draft is what follows them there."""
    lm = specjax.load(t5_folders.folder("t5"), dtype="float32")
    job = specjax.prepare(lm, SOURCES, drafter="ngram", num_speculative_tokens=3, max_new_tokens=8)
    state = prefill.empty(job.decoder, job.request, jnp.asarray(job.tokens))
    tokens = np.array(job.tokens)
    for row, source in enumerate(SOURCES):
        tokens[row, len(source) + 1 : len(source) + 3] = source[3:5]
    state = state._replace(tokens=jnp.asarray(tokens), lengths=job.request.prompt_lengths + 2)
    draft, _, _ = job.decoder.drafter.propose(lm, state.drafter, state, None, 3)
    assert draft.valid.all()
    assert draft.tokens.tolist() == [source[5:8] for source in SOURCES]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"no_repeat_ngram_size": 2}, {"repetition_penalty": 3.0}, {"no_repeat_ngram_size": 3}]
)
def test_repetition_counts_in_the_text_alone(options):
    """As in transformers: a summary may repeat its source."""
    lm = specjax.load(t5_folders.folder("t5"), dtype="float32")
    out = specjax.generate(lm, SOURCES, drafter="ngram", max_new_tokens=20, ignore_eos=True, **options)
    assert out.tokens == [t5_folders.greedy("t5", source, 20, **options) for source in SOURCES]


def test_a_draft_that_lags_near_the_end_of_its_cache_leaves_the_source_alone():
    """A block of 64 tokens that was moved back to fit would write over the source's entries."""
    lm = specjax.load(t5_folders.folder("t5"), dtype="float32")
    tokens = np.zeros((1, 32), np.int32)
    tokens[0, :30] = [*SOURCES[0], *TEXTS[0, :4]]
    job = specjax.prepare(lm, SOURCES[:1], max_new_tokens=4, drafter=None)
    state = prefill.empty(job.decoder, job.request, jnp.asarray(tokens))
    state = state._replace(lengths=jnp.array([30]), active=jnp.array([True]))
    lagging = kv.with_lengths(read(lm, tokens, ENDS[:1]).cache, jnp.array(ENDS[:1]))
    caught_up = jax.jit(prefill.catch_up, static_argnums=4)(lm, lagging, state, jnp.array([29]), 64)
    whole = call(lm, tokens[:, 26:29], lagging, ENDS[:1]).cache
    assert caught_up.lengths.tolist() == [29]
    for one, other in zip(caught_up.keys + caught_up.values, whole.keys + whole.values, strict=True):
        np.testing.assert_allclose(one[:, :, :29], other[:, :, :29], atol=1e-5)


def test_the_documents_table_has_every_configuration():
    check_documented(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_and_tensors_survive_a_round_trip(name):
    check_round_trip(t5_folders.folder(name), t5_folders.model(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "t5 1.1"])
def test_converted_and_eight_bit_folders_give_the_same_model(name, tmp_path):
    models = check_converted(t5_folders.folder(name), tmp_path)
    exact, rounded = (logits_of(model) for model in models)
    assert 0 < np.abs(exact - rounded).mean() < 0.25 * np.abs(exact).mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "t5 1.1"])
def test_every_tensor_matters(name):
    """Guards the tests above: were some weight ignored by both sides, they would agree and be wrong."""
    lm = specjax.load(t5_folders.folder(name), dtype="float32")
    logits = logits_of(lm)
    leaves, tree = jax.tree.flatten(lm.params)
    for i, leaf in enumerate(leaves):
        noise = np.random.default_rng(i).standard_normal(leaf.shape, dtype=np.float32)
        bent = jax.tree.unflatten(tree, [*leaves[:i], leaf + np.float32(0.1) * noise, *leaves[i + 1 :]])
        moved = logits_of(specjax.LM(lm.config, bent))
        assert np.abs(moved - logits).max() > 1e-3, jax.tree_util.tree_leaves_with_path(lm.params)[i][0]
