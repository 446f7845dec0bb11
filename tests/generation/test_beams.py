"""Beam search through ``generate``: the texts of transformers' beam search, plain and speculated, and fewer calls."""

import dataclasses
import functools
import random
import tempfile

import jax
import numpy as np
import pytest
import relatives
import t5_folders
import torch
import transformers

import specjax
from specjax import testing
from specjax.drafters import DraftModel, PromptLookup

VOCAB, EOS = 17, [5, 9]
# Options that transformers has under the same names. With fixed names all cases of one width share their programs.
SETTINGS = {
    "length_penalty": (1.0, 0.0, -1.0, 2.0),
    "early_stopping": (False, True, "never"),
    "no_repeat_ngram_size": (0, 2, 3),
    "max_new_tokens": (1, 7, 12, 16),
}


@functools.cache
def models(layers: int) -> tuple[transformers.LlamaForCausalLM, specjax.LM]:
    """A tiny Llama of transformers, which often ends its texts, and the same model here."""
    torch.manual_seed(layers)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.4, eos_token_id=EOS, pad_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return model, specjax.load(folder, dtype="float32")


def reference(model, prompt: list[int], eos: list[int], **options) -> tuple[list[list[int]], list[float]]:
    """The texts and scores of transformers' beam search for one prompt."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=eos or None, pad_token_id=0,
        output_scores=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    texts = [row[len(prompt) :] for row in out.sequences.tolist()]
    ends = [next((i + 1 for i, token in enumerate(text) if token in eos), len(text)) for text in texts]
    return [text[:end] for text, end in zip(texts, ends, strict=True)], out.sequences_scores.tolist()


def case(number: int, width: int) -> tuple[list[list[int]], dict]:
    """Two prompts and random options."""
    draw = random.Random(number)
    options = {name: draw.choice(values) for name, values in SETTINGS.items()}
    prompts = [[draw.randrange(VOCAB) for _ in range(draw.choice((1, 2, 9)))] for _ in range(2)]
    return prompts, dict(options, num_beams=width, num_return_sequences=draw.randint(1, width))


def check(layers: int, number: int, width: int) -> tuple[int, int]:
    """One case, plain and speculated, against transformers. -> the target calls of both."""
    model, lm = models(layers)
    prompts, options = case(number, width)
    expected = [reference(model, prompt, EOS, **options) for prompt in prompts]
    calls = []
    for drafter in (None, DraftModel(testing.noisy_twin(lm, 0.05))):  # often wrong
        out = specjax.generate(lm, prompts, drafter=drafter, num_speculative_tokens=3, **options)
        assert out.tokens == [text for texts, _ in expected for text in texts], options
        np.testing.assert_allclose(out.scores, [s for _, scores in expected for s in scores], rtol=1e-4, atol=1e-5)
        assert out.finish_reasons == ["stop" if text[-1] in EOS else "length" for text in out.tokens]
        calls.append(sum(m.num_steps for m in out.metrics[:: options["num_return_sequences"]]))
    return calls[0], calls[1]


def test_texts_and_scores_are_those_of_transformers_and_speculation_calls_the_target_less_often():
    counts = np.array([check(1, number, 3) for number in range(8)])
    assert (counts[:, 1] <= counts[:, 0]).all() and counts[:, 1].sum() < 0.8 * counts[:, 0].sum()


def test_a_draft_that_is_the_target_is_accepted_whole():
    """Round after round, so the entries of accepted tokens lie right in the draft's cache too."""
    _, lm = models(1)
    options = dict(num_beams=3, no_repeat_ngram_size=0, max_new_tokens=16, early_stopping="never", length_penalty=2.0)
    plain = specjax.generate(lm, [[1, 2], [3]], **options)
    out = specjax.generate(lm, [[1, 2], [3]], drafter=DraftModel(lm), num_speculative_tokens=3, **options)
    assert out.tokens == plain.tokens
    for drafted, alone in zip(out.metrics, plain.metrics, strict=True):
        *rounds, _ = drafted.per_step_accepted  # the last round ends with the search
        assert rounds == [3] * len(rounds) and len(rounds) >= 2
        assert drafted.completion_tokens == alone.completion_tokens == alone.num_steps
        drafted.check()


def test_texts_that_are_not_there_are_an_error_that_holds_the_others():
    _, lm = models(1)
    broken = dataclasses.replace(lm, params=jax.tree.map(lambda x: x * np.nan, lm.params))
    options = dict(num_beams=3, num_return_sequences=2, no_repeat_ngram_size=0, max_new_tokens=16)
    with pytest.raises(specjax.NoDistributionError, match="num_return_sequences=2 .* prompt 0, prompt 1") as caught:
        specjax.generate(broken, [[1, 2], [3]], **options)
    assert caught.value.result.tokens == [[]] * 4 and caught.value.result.finish_reasons == [None] * 4


@pytest.mark.slow
@pytest.mark.parametrize("width", (2, 4))
def test_random_cases_are_those_of_transformers(width):
    counts = np.array([check(2, number, width) for number in range(100 + width, 125 + width)])
    assert counts[:, 1].sum() < 0.9 * counts[:, 0].sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", relatives.ONE_OF_EACH)
def test_relatives_with_windows_are_those_of_transformers(name):
    """Windows are 5 tokens: a beam sees its own last tokens, wherever their entries lie."""
    lm = specjax.load(relatives.folder(name), dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(relatives.folder(name), dtype=torch.float32).eval()
    prompts, options = [[3, 1, 4, 1, 5, 9, 2, 6], [7]], dict(num_beams=3, num_return_sequences=3, max_new_tokens=14)
    expected = [reference(model, prompt, [], **options)[0] for prompt in prompts]
    for drafter in (None, DraftModel(testing.noisy_twin(lm, 0.01))):
        out = specjax.generate(lm, prompts, drafter=drafter, num_speculative_tokens=3, **options)
        assert out.tokens == [text for texts in expected for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("name", ("t5", "t5 1.1"))
def test_beams_over_an_encoder_are_those_of_transformers(name):
    """Repetition counts in the text alone, and each row has a source of its own length."""
    lm, model = specjax.load(t5_folders.folder(name), dtype="float32"), t5_folders.model(name)
    sources, count = [[5, 9, 3, 3, 7, 2, 8], [4, 6]], 3
    options = dict(num_beams=count, num_return_sequences=count, max_new_tokens=12, no_repeat_ngram_size=2)
    expected = []
    for source in sources:
        ids = torch.tensor([source])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=1, pad_token_id=0, **options
        )
        texts = [row[1:] for row in out.tolist()]
        expected += [text[: text.index(1) + 1] if 1 in text else text[:12] for text in texts]
    for drafter in (None, DraftModel(testing.noisy_twin(lm, 0.02))):
        out = specjax.generate(lm, sources, drafter=drafter, num_speculative_tokens=3, **options)
        assert out.tokens == expected
    assert out.metrics[0].num_accepted_tokens > 0


PENALTIES = {
    "repetition_penalty": dict(repetition_penalty=1.3),
    "min_new_tokens": dict(min_new_tokens=6),
    "bias": dict(logit_bias={3: 4.0, 7: -2.0}),
    "allowed": dict(allowed_token_ids=[1, 3, 5, 6, 8, 11]),
}
THEIRS = {
    "bias": dict(sequence_bias={(3,): 4.0, (7,): -2.0}),
    "allowed": dict(suppress_tokens=[i for i in range(VOCAB) if i not in PENALTIES["allowed"]["allowed_token_ids"]]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_and_masks_are_those_of_transformers(name):
    model, lm = models(1)
    options = dict(num_beams=3, num_return_sequences=3, max_new_tokens=12)
    expected = reference(model, [1, 2, 3], EOS, **options, **THEIRS.get(name, PENALTIES[name]))
    for drafter in (None, DraftModel(testing.noisy_twin(lm, 0.02))):
        given = dict(options, **PENALTIES[name], drafter=drafter, num_speculative_tokens=3)
        out = specjax.generate(lm, [[1, 2, 3]], **given)
        assert out.tokens == expected[0]
        np.testing.assert_allclose(out.scores, expected[1], rtol=1e-4, atol=1e-5)


REFUSALS = {
    "top_p can't be combined with num_beams": dict(top_p=0.9),
    "num_beams must be an integer of at least 1, got True": dict(num_beams=True),
    "num_beams must be an integer": dict(num_beams=0),
    "num_beams=1099511627776 needs room for": dict(num_beams=1 << 40),
    "num_beams=100 needs room for": dict(
        num_beams=np.int8(100), num_draft_beams=1 << 40, drafter=DraftModel(testing.tiny_lm())
    ),
    "num_return_sequences must be .* which is 3, got 4": dict(num_return_sequences=4),
    "length_penalty must be a number from -5 to 5, got 9": dict(length_penalty=9),
    "early_stopping must be True, False or 'never', got 'no'": dict(early_stopping="no"),
    "num_draft_beams must be .* num_beams, which is 3": dict(num_draft_beams=2),
    "temperature must be 0 in beam search": dict(temperature=[0.0, 0.5]),
    "verifier can't be combined with num_beams": dict(verifier="block"),
    "block_width can't": dict(block_width=8),
    "stop can't": dict(stop="a"),
    "logprobs can't": dict(logprobs=True),
    "logprobs can't be": dict(logprobs=0),
    "num_draft_beams=6 needs a draft": dict(num_draft_beams=6),
    "capacity can't": dict(capacity=64),
    "PromptLookup can't draft for beams": dict(drafter="ngram"),
    "PromptLookup can't draft": dict(drafter=PromptLookup()),
    "draft temperature has no effect": dict(drafter=DraftModel(testing.tiny_lm(), temperature=0.5)),
    "prompt 1 has no room for a new token": dict(max_new_tokens=[3, 0]),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_beams_can_not_be_combined_with_is_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        specjax.generate(testing.tiny_lm(), [[1], [2]], **{"num_beams": 3, **REFUSALS[message]})


@pytest.mark.parametrize("call", (specjax.prepare, specjax.stream, specjax.warmup))
def test_streams_and_jobs_refuse_beams_by_name(call):
    with pytest.raises(ValueError, match="num_beams=3: only specjax.generate searches with beams"):
        call(testing.tiny_lm(), [[1]], num_beams=3)


def test_options_of_beams_without_beams_are_refused():
    with pytest.raises(ValueError, match="length_penalty, early_stopping is for beam search"):
        specjax.generate(testing.tiny_lm(), [[1]], length_penalty=2.0, early_stopping=True)
