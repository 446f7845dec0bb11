"""A request in a busy engine gives the same tokens as the request alone: through ``generate``, and through an engine.

One crowd of requests has every kind of sampling parameter. Every drafter of the conformance table is a case.
"""

import random

import numpy as np
import pytest
from drafter_table import DRAFTERS, TARGET, TARGETS, pairs

import specjax
from specjax import testing
from specjax.models.cache import PAGE

K, CAPACITY, EOS = 3, 200, 2
KINDS = [dict(s) for s in testing.trial.SETTINGS.values()]  # each sampling transform, alone and with others
for kind in KINDS:  # a long text over four tokens has every trigram
    kind.update({"no_repeat_ngram_size": 6} if "no_repeat_ngram_size" in kind else {})
NEUTRAL = dict(
    temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=None, presence_penalty=None,
    frequency_penalty=None, no_repeat_ngram_size=None, logit_bias=None, min_new_tokens=None, allowed_token_ids=None,
)  # fmt: skip
LENGTHS = (5, 1, 70, 130, 64, 65, 66, 128, 129, 2, 3)  # around whole pages, and shorter than a draft
# By default the drafter that keeps most: a cache, and a feature of the target. Other tests have it with `rejection`.
QUICK = {("head", "block")}


def crowd(count=33):
    """Requests of all kinds, as keyword arguments of ``submit``. Some have equal prompts, and some a common prefix."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 4, LENGTHS[i % len(LENGTHS)]).tolist() for i in range(count)]
    prompts[7] = prompts[3][:]
    prompts[9] = prompts[3] + [1, 2, 2]
    prompts[20] = prompts[8] + [3] * 20
    return [
        {**NEUTRAL, **KINDS[i % len(KINDS)], "prompt": prompt, "seed": 100 + i, "max_new_tokens": 4 + 3 * (i % 6)}
        for i, prompt in enumerate(prompts)
    ]


def way(drafter, verifier):
    return dict(drafter=DRAFTERS[drafter], verifier=verifier, num_speculative_tokens=K)


def by_generate(target, requests, drafter, verifier):
    """The result of one ``generate`` call with all requests, at the engine's block width."""
    width = DRAFTERS[drafter].plan(target, K).block
    lists = {name: [r[name] for r in requests] for name in (*NEUTRAL, "seed", "max_new_tokens")}
    prompts = [r["prompt"] for r in requests]
    return specjax.generate(
        target, prompts, block_width=width, capacity=CAPACITY, eos_token_id=EOS, logprobs=2, **lists,
        **way(drafter, verifier),
    )  # fmt: skip


def by_engine(engine, requests, order, abort_some=True):
    """The results of the requests, submitted in the given order, with other requests in between that are aborted."""
    rng, handles = random.Random(len(order)), {}
    for i in order:
        handles[i] = engine.submit(**requests[i], eos_token_id=EOS, logprobs=2 if i % 3 == 0 else False)
        if abort_some and rng.random() < 0.3:
            doomed = engine.submit(requests[i]["prompt"], max_new_tokens=40, seed=1, temperature=1.0)
            if rng.random() < 0.5:
                next(doomed)
            doomed.abort()
    return [handles[i].result(300) for i in range(len(requests))]


@pytest.mark.parametrize("drafter, verifier", pairs(QUICK))
def test_a_busy_engine_gives_each_request_the_tokens_it_has_alone(drafter, verifier, monkeypatch):
    if drafter == "prompt lookup":  # with checks a fault is an error of the engine; the others show it in a text
        monkeypatch.setenv("SPECJAX_CHECK", "1")
    target, requests = TARGETS.get(drafter, TARGET), crowd()
    alone = by_generate(target, requests, drafter, verifier)
    sizes = dict(slots=3, capacity=CAPACITY, prefill_chunk=64, kv_tokens=12 * PAGE)  # pages are scarce
    with specjax.Engine(target, **sizes, **way(drafter, verifier)) as engine:
        free = engine.stats().free_kv_tokens
        shuffled = random.Random(0).sample(range(len(requests)), len(requests))
        found = by_engine(engine, requests, shuffled)
        again = by_engine(engine, requests, shuffled[::-1], abort_some=False)
        stats = engine.stats()
    for i, (result, other) in enumerate(zip(found, again, strict=True)):
        assert result.tokens[0] == other.tokens[0] == alone.tokens[i], i
        assert result.finish_reasons[0] == alone.finish_reasons[i]
        assert result.metrics[0].per_step_accepted == alone.metrics[i].per_step_accepted
        if i % 3 == 0:
            assert result.logprobs == other.logprobs  # to the last bit: one engine has one shape
            np.testing.assert_allclose(result.logprobs[0], alone.logprobs[i], rtol=1e-4, atol=1e-5)
            assert [len(top) for top in result.top_logprobs[0]] == [2] * len(result.tokens[0])
    assert stats.cached_tokens > 0 and stats.free_kv_tokens == free and stats.running == stats.waiting == 0


@pytest.mark.parametrize("slots, chunk, prefix_cache", [(1, 64, True), (8, 128, False), (3, 128, True)])
@pytest.mark.slow
def test_neither_slots_nor_chunks_nor_the_prefix_cache_change_a_token(slots, chunk, prefix_cache):
    requests = crowd()
    for drafter, verifier in (("head", "rejection"), ("noisy twin", "block")):
        target = TARGETS.get(drafter, TARGET)
        alone = by_generate(target, requests, drafter, verifier)
        sizes = dict(slots=slots, capacity=CAPACITY, prefill_chunk=chunk, prefix_cache=prefix_cache)
        with specjax.Engine(target, **sizes, **way(drafter, verifier)) as engine:
            found = by_engine(engine, requests, range(len(requests)))
        assert [r.tokens[0] for r in found] == alone.tokens


def test_a_hit_of_the_prefix_cache_is_accepted_like_a_miss():
    """The draft model's and the head's entries of the prefix are found too, and so no draft is worse after a hit."""
    for drafter, chunk, length in (("noisy twin", 64, 150), ("head", 128, 220)):  # three pages are no whole chunks
        target = TARGETS.get(drafter, TARGET)
        prompt = np.random.default_rng(5).integers(0, 4, length).tolist()
        sizes = dict(slots=2, capacity=250, prefill_chunk=chunk)
        with specjax.Engine(target, **sizes, **way(drafter, "rejection")) as engine:
            options = dict(max_new_tokens=30, temperature=0.8, ignore_eos=True, logprobs=True)
            first, second = (engine.submit(prompt, **options) for _ in range(2))
            miss, hit = first.result(300), second.result(300)
            other = engine.submit(prompt, cache_salt="another", **options)
            other.result(300)
        assert (first.cached_tokens, second.cached_tokens, other.cached_tokens) == (0, 128, 0)
        assert miss.tokens == hit.tokens and miss.logprobs == hit.logprobs
        assert miss.metrics[0].to_dict() == hit.metrics[0].to_dict() and miss.metrics[0].num_accepted_tokens > 0
