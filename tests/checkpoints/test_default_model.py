"""The default model in float32: every drafter writes what plain decoding and transformers write."""

import dataclasses

import pytest

import specjax
from specjax.drafters import DraftModel, PromptLookup

PROMPTS = [
    "Repeat after me, twice: the quick brown fox jumps over the lazy dog.",
    "What is the capital of France?",
    "Translate to French: I would like a cup of tea, please.",
]


@pytest.fixture(scope="module")
def lm(default_lm):
    return default_lm


def first_layers(lm, count):
    """A draft of the target's first layers: cheap, and often wrong."""
    config = dataclasses.replace(lm.config, num_hidden_layers=count)
    layers = {str(i): lm.params["layers"][str(i)] for i in range(count)}
    return specjax.LM(config, {**lm.params, "layers": layers}, lm.tokenizer)


@pytest.fixture(scope="module")
def plain(lm):
    return specjax.generate(lm, PROMPTS, max_new_tokens=32, chat=True)


def test_text_is_sensible(plain):
    assert "Paris" in plain.texts[1]
    assert "quick brown fox" in plain.texts[0]


@pytest.mark.slow
def test_prompt_lookup_writes_the_plain_text(lm, plain):
    out = specjax.generate(lm, PROMPTS, drafter=PromptLookup(), max_new_tokens=32, chat=True)
    assert out.tokens == plain.tokens
    assert out.metrics[0].num_accepted_tokens > 0
    for metrics in out.metrics:
        metrics.check()


@pytest.mark.slow  # the draft that comes with specjax, below, is a model too, and often wrong
def test_draft_model_writes_the_plain_text(lm, plain):
    draft = DraftModel(first_layers(lm, 4))
    out = specjax.generate(lm, PROMPTS, drafter=draft, num_speculative_tokens=3, max_new_tokens=32, chat=True)
    assert out.tokens == plain.tokens and out.metrics[0].num_draft_tokens > 0


@pytest.mark.parametrize(
    "name, least",
    [
        ("smollm2-135m-instruct-eagle3", 1.8),
        pytest.param("smollm2-135m-instruct-draft", 1.4, marks=pytest.mark.slow),
    ],
)
def test_shipped_drafters_write_the_plain_text_in_fewer_steps(lm, plain, name, least):
    drafter = specjax.drafters.load(name, lm)
    out = specjax.generate(lm, PROMPTS, drafter=drafter, num_speculative_tokens=3, max_new_tokens=32, chat=True)
    assert out.tokens == plain.tokens
    assert sum(map(len, out.tokens)) / sum(m.num_steps for m in out.metrics) > least


def test_transformers_writes_the_plain_text(lm, plain):
    pytest.importorskip("torch")
    from commands import script

    theirs = script("parity").transformers_greedy(lm, plain.prompt_tokens, 32)
    assert plain.tokens == theirs


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("name", ["ngram", "first layers", "self"])
def test_coupled_sampling_is_token_for_token_plain(lm, name, size, batch):
    drafter = {"ngram": PromptLookup(), "first layers": DraftModel(first_layers(lm, 4)), "self": DraftModel(lm)}[name]
    prompts = (PROMPTS + ["Write a poem about the sea."])[:batch]
    common = dict(temperature=0.8, top_p=0.9, max_new_tokens=24, seed=7, chat=True)
    want = specjax.generate(lm, prompts, **common).tokens
    options = dict(drafter=drafter, verifier="coupled", num_speculative_tokens=size, **common)
    out = specjax.generate(lm, prompts, **options)
    assert out.tokens == want
    streamed = specjax.stream(lm, prompts, **options)
    for _ in streamed:
        pass
    assert streamed.result().tokens == want and streamed.result().metrics == out.metrics
    if name == "self":
        assert all(m.draft_acceptance_rate == 1.0 for m in out.metrics)
