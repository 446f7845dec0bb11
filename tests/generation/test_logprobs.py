"""Log-probabilities of the tokens, and of the best ones at each position, against one call on the whole text."""

import jax
import numpy as np
import pytest

from specjax import generate, stream, testing
from specjax.drafters import DraftModel, PromptLookup, TreeModel
from specjax.generation.generate import prepare

LM = testing.tiny_lm(0, std=0.7, vocab_size=8)
TWIN = testing.noisy_twin(LM, 0.2)
DRAFTERS = {
    "plain": None,
    "prompt lookup": PromptLookup(prompt_lookup_min=1),
    "twin": DraftModel(TWIN, prefill_chunk=4),
    "tree": TreeModel(TWIN, (2, 2, 1), prefill_chunk=4),
}
PROMPTS = [[1, 2, 0, 1, 2], [4]]


def given(drafter, **options):
    return dict(
        drafter=DRAFTERS[drafter], num_speculative_tokens=3, max_new_tokens=12, temperature=0.8, top_k=3,
        logit_bias={1: 2.0}, ignore_eos=True, **options,
    )  # fmt: skip


def taught(prompt, tokens):
    """Raw log-probabilities at each new token's position, f32[tokens, V]."""
    text = np.zeros(32, np.int32)
    end = len(prompt) + len(tokens)
    text[:end] = [*prompt, *tokens]
    return np.asarray(log_law(LM, text))[len(prompt) - 1 : end - 1]


@jax.jit
def log_law(lm, text):
    """Raw log-probabilities after each token of a text, f32[T, V], from one call of the model."""
    return jax.nn.log_softmax(lm(text[None], lm.alloc_cache(1, len(text))).logits[0])


@pytest.mark.parametrize(
    "drafter", [pytest.param(d, marks=() if d in ("plain", "tree") else pytest.mark.slow) for d in DRAFTERS]
)
def test_the_best_tokens_are_those_of_the_raw_logits_whatever_was_drafted(drafter):
    out = generate(LM, PROMPTS, logprobs=5, **given(drafter))
    for prompt, tokens, own, best in zip(PROMPTS, out.tokens, out.logprobs, out.top_logprobs, strict=True):
        want = taught(prompt, tokens)
        np.testing.assert_allclose(own, want[np.arange(len(tokens)), tokens], atol=1e-4)
        assert len(best) == len(tokens)
        for position, pairs in zip(want, best, strict=True):
            assert [token for token, _ in pairs] == np.argsort(-position, kind="stable")[:5].tolist()
            np.testing.assert_allclose([value for _, value in pairs], np.sort(position)[::-1][:5], atol=1e-4)
            assert all(type(token) is int and type(value) is float for token, value in pairs)


@pytest.mark.parametrize("drafter", [*(pytest.param(d, marks=pytest.mark.slow) for d in ("plain", "twin")), "tree"])
def test_a_stream_says_the_same_with_each_token(drafter):
    want = generate(LM, PROMPTS, logprobs=5, **given(drafter))
    events = stream(LM, PROMPTS, logprobs=5, **given(drafter))
    seen = list(events)
    for row in range(2):
        own = [e for e in seen if e.row == row]
        np.testing.assert_allclose([e.logprob for e in own], want.logprobs[row], atol=1e-4)
        for event, pairs in zip(own, want.top_logprobs[row], strict=True):
            assert [token for token, _ in event.top_logprobs] == [token for token, _ in pairs]
        assert events.result().logprobs[row] == [e.logprob for e in own]
        assert events.result().top_logprobs[row] == [e.top_logprobs for e in own]


@pytest.mark.parametrize("asked, own, best", [
    (False, False, None),
    *(pytest.param(asked, True, best, marks=pytest.mark.slow) for asked, best in ((1, 1), (True, None), (0, None))),
])  # fmt: skip
def test_what_is_not_asked_for_is_not_computed(asked, own, best):
    out = generate(LM, PROMPTS, logprobs=asked, **given("plain"))
    assert (out.logprobs is not None) == own and (out.top_logprobs is not None) == (best is not None)
    events = stream(LM, PROMPTS, logprobs=asked, **given("plain"))
    event = next(events)
    assert (event.logprob is not None) == own and (event.top_logprobs is not None) == (best is not None)
    job = prepare(LM, PROMPTS, logprobs=asked, **given("plain"))
    state, info = jax.eval_shape(lambda: job.decoder.round(job.start()))
    assert (state.history.logprobs is not None) == own
    for held in (state.history.top, info.top):
        assert (held is not None) == (best is not None)


def test_one_is_not_true_though_python_thinks_them_equal():
    """Compiled programs are looked up by the equality of their static arguments."""
    for asked in (True, 1, True, 0, False):
        out = generate(LM, PROMPTS, logprobs=asked, **given("plain"))
        assert (out.top_logprobs is not None) == (asked is not True and asked == 1)


def test_more_than_the_vocabulary_is_all_of_it_and_nonsense_is_refused():
    out = generate(LM, [[1]], logprobs=2**40, max_new_tokens=2)
    assert [sorted(token for token, _ in pairs) for pairs in out.top_logprobs[0]] == [list(range(8))] * 2
    for bad in (-1, 1.5, "5", None, [5]):
        with pytest.raises(ValueError, match="logprobs must be"):
            generate(LM, [[1]], logprobs=bad)


def test_a_row_that_generates_nothing_has_none():
    out = generate(LM, PROMPTS, logprobs=5, **{**given("plain"), "max_new_tokens": [0, 12]})
    assert out.logprobs[0] == [] and out.top_logprobs[0] == [] and len(out.top_logprobs[1]) == 12
