"""The engine over a T5: sources of any length are read whole, and share nothing but the samples of one source."""

import families
import numpy as np
import pytest

import specjax
from specjax import testing
from specjax.drafters import DraftModel, FirstOf, PromptLookup

pytestmark = pytest.mark.slow
LM = families.tiny("t5", vocab_size=12, std=0.5)
RNG = np.random.default_rng(3)
LONG = RNG.integers(2, 12, 150).tolist()
SOURCES = [LONG, [*LONG[:128], 5, 6], [3], RNG.integers(2, 12, 64).tolist(), RNG.integers(2, 12, 65).tolist()]
OPTIONS = dict(temperature=0.9, ignore_eos=True, max_new_tokens=20)
DRAFTER = FirstOf(PromptLookup(prompt_lookup_min=1), DraftModel(testing.noisy_twin(LM, 0.1)))
FIXED = dict(drafter=DRAFTER, num_speculative_tokens=3)


def alone(source, seed, **changes):
    options = {**FIXED, **OPTIONS, **changes}
    return specjax.generate(LM, [source], seed=seed, block_width=4, capacity=256, **options)


def test_every_request_has_the_text_that_it_has_alone(monkeypatch):
    """Two sources begin with the same two pages, of which every entry differs: the encoder looks both ways."""
    monkeypatch.setenv("SPECJAX_CHECK", "1")
    with specjax.Engine(LM, slots=3, capacity=192, **FIXED) as engine:
        handles = [engine.submit(source, seed=seed, **OPTIONS) for seed, source in enumerate(SOURCES * 2)]
        got = [handle.result(600).tokens[0] for handle in handles]
        assert engine.stats().cached_tokens == 0
    assert got == [alone(source, seed).tokens[0] for seed, source in enumerate(SOURCES * 2)]


def test_requests_that_are_swapped_out_keep_their_sources():
    options = {**OPTIONS, "max_new_tokens": 170}
    with specjax.Engine(LM, slots=3, capacity=256, overcommit=True, kv_tokens=8 * 64, **FIXED) as engine:
        handles = [engine.submit(source, seed=seed, **options) for seed, source in enumerate(SOURCES[2:])]
        got = [handle.result(600).tokens[0] for handle in handles]
        assert engine.stats().swaps > 0
    assert got == [alone(source, seed, max_new_tokens=170).tokens[0] for seed, source in enumerate(SOURCES[2:])]


def test_samples_share_their_source():
    with specjax.Engine(LM, slots=2, capacity=192, **FIXED) as engine:
        engine.submit(SOURCES[1], **OPTIONS).result(600)  # leaves pages of the same beginning behind
        handles = engine.submit_many(SOURCES[0], 3, seed=5, logprobs=True, **OPTIONS)
        got = [handle.result(600) for handle in handles]
        assert engine.stats().cached_tokens > 0
    for i, one in enumerate(got):
        want = alone(SOURCES[0], 5 + i, logprobs=True)
        assert one.tokens == want.tokens
        np.testing.assert_allclose(one.logprobs, want.logprobs, atol=1e-4)  # a page of another source changes these


def test_warm_programs_serve_every_length():
    with specjax.Engine(LM, slots=2, capacity=192, **FIXED) as engine:
        engine.warmup()
        with testing.count_traces() as seen:
            for source in SOURCES:
                engine.submit(source, **OPTIONS).result(600)
        assert seen.compiled == 0
