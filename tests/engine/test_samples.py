"""Several samples of one prompt: each as if alone, although the prompt is read once and its pages are shared."""

import itertools

import numpy as np
import pytest
from drafter_table import DRAFTERS, TARGET, TARGETS, pairs

import specjax
from specjax.engine.loop import Loop
from specjax.models.cache import PAGE

SIZES = dict(slots=2, capacity=200, prefill_chunk=64, num_speculative_tokens=3)
TEXT = np.random.default_rng(2).integers(0, 4, 160).tolist()
LENGTHS = (1, 2, 5, 64, 65, 66, 67, 129, 130, 131, 160)  # around whole pages
OPTIONS = dict(max_new_tokens=9, temperature=0.9, ignore_eos=True, logprobs=True)


@pytest.fixture
def chunks(monkeypatch):
    """The chunks of prompts that were read."""
    monkeypatch.setenv("SPECJAX_CHECK", "1")
    read, feed = [], Loop._feed
    monkeypatch.setattr(Loop, "_feed", lambda loop, start: read.append(start) or feed(loop, start))
    return read


def started(drafter="head", verifier="rejection", **sizes):
    return specjax.Engine(
        TARGETS.get(drafter, TARGET), drafter=DRAFTERS[drafter], verifier=verifier, **{**SIZES, **sizes}
    )


def alone(engine, prompt, seed, **options):
    """A sample as a request of its own, which finds nothing in the prefix cache."""
    handle = engine.submit(prompt, seed=seed, cache_salt=f"seed {seed}", **{**OPTIONS, **options})
    return handle.result(300)


def each_case():
    for pair, known in itertools.product(pairs({("head", "rejection")}), (True, False)):
        yield pytest.param(*pair.values, known, marks=pair.marks)


@pytest.mark.parametrize("drafter, verifier, prefix_cache", list(each_case()))
def test_samples_are_those_of_requests_alone_and_the_prompt_is_read_once(drafter, verifier, prefix_cache, chunks):
    with started(drafter, verifier, prefix_cache=prefix_cache) as engine:
        free = engine.stats().free_kv_tokens
        for length in LENGTHS:
            prompt = TEXT[-length:]
            chunks.clear()
            results = [handle.result(300) for handle in engine.submit_many(prompt, 3, seed=length, **OPTIONS)]
            assert len(chunks) == -(-(length - 1) // 64)
            assert [result.seeds for result in results] == [[length], [length + 1], [length + 2]]
            for seed, result in enumerate(results, length):
                expected = alone(engine, prompt, seed)
                assert result.tokens == expected.tokens and result.logprobs == expected.logprobs, (length, seed)
                assert result.metrics[0].to_dict() == expected.metrics[0].to_dict()
        assert engine.stats().free_kv_tokens == free
    assert len({tuple(result.tokens[0]) for result in results}) > 1  # two may be alike: the texts are short and repeat


def test_one_sample_is_aborted_alone_also_the_one_that_reads_the_prompt(chunks, monkeypatch):
    with started() as engine:
        busy = engine.submit([1], max_new_tokens=190, temperature=1.0, ignore_eos=True)
        next(busy)
        handles, feed = [], Loop._feed
        monkeypatch.setattr(Loop, "_feed", lambda *args: handles[0].abort() or feed(*args))
        engine.between_rounds(lambda: handles.extend(engine.submit_many(TEXT, 3, seed=4, **OPTIONS))).result()
        results = [handle.result(300) for handle in handles]
        busy.abort()
        monkeypatch.undo()
        handles = engine.submit_many(TEXT, 3, seed=4, cache_salt="other", **OPTIONS)
        handles[2].abort()
        results += [handle.result(300) for handle in handles]
        assert handles[0]._ticket.samples.read is None, "the prompt is not kept for a sample that was aborted"
        expected = [alone(engine, TEXT, seed).tokens for seed in (4, 5, 6)]
    assert [result.finish_reasons[0] for result in results] == ["abort", *["length"] * 4, "abort"]
    assert [result.tokens for result in results[1:5]] == [expected[i] for i in (1, 2, 0, 1)]


def test_a_prompt_whose_pages_were_given_away_is_read_again(chunks):
    with started(slots=1, kv_tokens=4 * PAGE) as engine:
        urgent = []

        def told(sample, event):  # the first sample's first token
            if not urgent:
                urgent.append(engine.submit([2] * 175, priority=-1, max_new_tokens=10, temperature=1.0))

        first, second = engine.submit_many(TEXT, 2, seed=1, listener=told, **OPTIONS)
        results = [handle.result(300) for handle in (first, second)]
        urgent[0].result(300)
        assert len(chunks) == 3 + 3 + 3
        assert [result.tokens for result in results] == [alone(engine, TEXT, seed).tokens for seed in (1, 2)]
        assert second._ticket.samples.read is None  # nothing is kept when nobody waits


def test_listeners_are_told_the_sample_and_samples_wait_together_or_not_at_all(chunks):
    seen = []
    with started(max_waiting=3) as engine:
        handles = engine.submit_many(TEXT[:5], 3, listener=lambda *told: seen.append(told), **OPTIONS)
        results = [handle.result(300) for handle in handles]
        for i, result in enumerate(results):
            assert [event.token for sample, event in seen if sample == i] == result.tokens[0]
        before = engine.stats()
        with pytest.raises(ValueError, match="n must be an integer from 1 to max_waiting, which is 3, got 4"):
            engine.submit_many(TEXT, 4)
        with pytest.raises(ValueError, match="seed"):
            engine.submit_many(TEXT, 2, seed=2**64 - 1)
        handles = []

        def fill():
            handles.extend(engine.submit_many(TEXT, 2, **OPTIONS))
            with pytest.raises(specjax.QueueFullError):
                engine.submit_many(TEXT, 2, **OPTIONS)

        engine.between_rounds(fill).result()
        assert len([handle.result(300) for handle in handles]) == 2
        assert engine.stats().finished["length"] - before.finished["length"] == 2
