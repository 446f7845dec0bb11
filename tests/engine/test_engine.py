"""What users of the engine rely on: streaming, stops, aborts, refusals, order, errors, and no compilation."""

import contextlib
import dataclasses
import itertools
import threading
import time

import jax
import numpy as np
import pytest
from drafter_table import PASS, TARGET, TWIN

import specjax
from specjax import drafters
from specjax.engine.loop import Loop

SIZES = dict(slots=2, capacity=128, prefill_chunk=64, num_speculative_tokens=3)
TOKENS = dict(ignore_eos=True, temperature=0.9)
PROMPT = [1, 2, 3, 1, 2]
VARYING = drafters.Adaptive(PASS, drafters.Heuristic())


class Letters:
    """A tokenizer of four letters."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join("abcd"[i] for i in ids)

    def special_id(self, text):
        return None

    def token_str(self, token):
        return "?"


@pytest.fixture(scope="module")
def engine():
    target = dataclasses.replace(TARGET, tokenizer=Letters())
    with specjax.Engine(target, drafter=TWIN, **SIZES) as engine:
        engine.warmup()
        yield engine


def alone(engine, prompt, **options):
    """The result of ``generate`` at the engine's block width."""
    given = dict(drafter=TWIN, num_speculative_tokens=3, block_width=4, capacity=128)
    return specjax.generate(engine.lm, [prompt], **given, **options)


def test_events_add_up_to_the_result(engine):
    options = dict(max_new_tokens=12, seed=3, logprobs=2, **TOKENS)
    handle = engine.submit(PROMPT, **options)
    events = list(handle)
    result, expected = handle.result(), alone(engine, PROMPT, **options)
    assert [e.token for e in events] == result.tokens[0] == expected.tokens[0]
    assert "".join(e.text for e in events) == result.texts[0] == expected.texts[0]
    assert [e.origin for e in events] == expected.metrics[0].origins()
    assert [e.finish_reason for e in events] == [None] * 11 + ["length"]
    assert result.logprobs[0] == [e.logprob for e in events] and result.seeds == [3]
    assert list(handle) == []  # once more: at the end


def test_a_stop_string_ends_text_ids_and_log_probabilities_together(engine):
    whole = alone(engine, PROMPT, max_new_tokens=30, seed=5, **TOKENS)
    stop = whole.texts[0][9:11]
    options = dict(max_new_tokens=30, seed=5, logprobs=True, stop=stop, **TOKENS)
    result, expected = engine.submit(PROMPT, **options).result(), alone(engine, PROMPT, **options)
    assert result.tokens == expected.tokens and result.texts == expected.texts
    assert result.texts[0].endswith(stop) and result.finish_reasons == ["stop"]
    assert len(result.logprobs[0]) == len(result.tokens[0]) == result.metrics[0].completion_tokens
    origins = whole.metrics[0].origins()
    cut = next(i for i, pair in enumerate(zip(origins, origins[1:], strict=False)) if pair == ("accepted",) * 2)
    before = engine.stats()
    result = engine.submit(PROMPT, **{**options, "stop": whole.texts[0][: cut + 1]}).result()
    assert len(result.tokens[0]) == cut + 1, "the text ends inside a draft, and the rest of the draft does not count"
    assert engine.stats().accepted - before.accepted == result.metrics[0].num_accepted_tokens


def test_no_round_is_started_that_no_request_needs(engine):
    before = engine.stats().rounds
    engine.submit(PROMPT, max_new_tokens=1, **TOKENS).result()
    engine.submit(PROMPT, max_new_tokens=1, **TOKENS).result()
    assert engine.stats().rounds == before + 2


def test_min_new_tokens_counts_tokens(engine):
    options = dict(max_new_tokens=20, min_new_tokens=7, seed=1, temperature=1.0, eos_token_id=[0, 1, 2])
    result = engine.submit(PROMPT, **options).result()
    assert result.tokens == alone(engine, PROMPT, **options).tokens
    assert len(result.tokens[0]) == 8 and result.finish_reasons == ["stop"]


def test_a_request_ends_exactly_at_the_capacity(engine):
    result = engine.submit(PROMPT, max_new_tokens=None, **TOKENS).result()
    assert len(result.tokens[0]) == 128 - len(PROMPT) and result.finish_reasons == ["length"]
    assert len(engine.submit(PROMPT, max_new_tokens=[-1], **TOKENS).result().tokens[0]) == 128 - len(PROMPT)
    assert engine.submit(PROMPT, max_new_tokens=0, **TOKENS).result().finish_reasons == ["length"]


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(prompt=[0] * 128), "needs room for 129 tokens"),
        (dict(max_new_tokens=200), "at most 128"),
        (dict(drafter="none"), "drafter can't be given for one request"),
        (dict(capacity=64), "capacity can't be given"),
        (dict(priority="high"), "priority must be an integer"),
        (dict(tempersture=1), "temperature"),
        (dict(top_p=0), "top_p must be"),
        (dict(prompt=[9]), "outside the model's vocabulary"),
        (dict(prompt=[0] * 128, max_new_tokens=0), "128 of the prompt and 1 new ones"),
        (dict(cache_salt=None), "cache_salt must be a string"),
        (dict(listener=3), "listener must be a function"),
        (dict(prompt=5), "prompt must be one prompt"),
        (dict(prompt=None), "prompt must be one prompt"),
        (dict(prompt=b"text"), "prompt must be one prompt"),
    ],
)
def test_bad_requests_are_refused_at_once(engine, given, message):
    before = engine.stats()
    with pytest.raises(ValueError, match=message):
        engine.submit(**{"prompt": PROMPT, **given})
    assert engine.stats() == before


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(slots=0), "slots must be an integer of at least 1"),
        (dict(prefill_chunk=100), "multiple of 64"),
        (dict(kv_tokens=-1), "kv_tokens"),
        (dict(drafter="best"), "drafter must be one of"),
        (dict(block_width=2), "block_width must be at least 4"),
        (dict(max_logprobs=-1), "max_logprobs must be an integer of at least 0"),
        (dict(max_listed=None), "max_listed"),
        (dict(capacity=1), "no request fits into capacity 1"),
        (dict(lm=None), "lm must be a model"),
        (dict(exact="no"), "exact must be True or False"),
        (dict(prefix_cache="no"), "prefix_cache must be True or False"),
        (dict(drafter=VARYING), "Adaptive drafts in calls whose shape depends"),
        (dict(drafter=drafters.FirstOf(drafters.PromptLookup(), VARYING)), "FirstOf drafts in"),
        (dict(kv_tokens=1, drafter=drafters.TreeModel(TWIN.lm, (4, 4, 2))), "no request fits"),
    ],
)
def test_bad_engines_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        specjax.Engine(**{"lm": TARGET, "drafter": TWIN, **SIZES, **given})


def test_a_request_that_no_token_satisfies_ends_alone(engine):
    good = engine.submit(PROMPT, max_new_tokens=20, seed=2, **TOKENS)
    bad = engine.submit(PROMPT, max_new_tokens=20, logit_bias=dict.fromkeys(range(4), -np.inf), **TOKENS)
    with pytest.raises(specjax.NoDistributionError):
        bad.result()
    assert list(bad) == []
    assert good.result().tokens == alone(engine, PROMPT, max_new_tokens=20, seed=2, **TOKENS).tokens
    assert engine.stats().finished["error"] >= 1


def test_random_aborts_leave_slots_and_pages_behind(engine):
    rng, free = np.random.default_rng(0), engine.stats().free_kv_tokens
    handles = [engine.submit(PROMPT, max_new_tokens=60, seed=i, **TOKENS) for i in range(60)]
    for i in rng.permutation(60):
        if i % 2:
            next(handles[i], None)
        handles[i].abort()
        handles[i].abort()  # once more: nothing happens
    results = [handle.result() for handle in handles]
    assert {reason for result in results for reason in result.finish_reasons} <= {"abort", "length"}
    stats = engine.stats()
    assert (stats.free_kv_tokens, stats.running, stats.waiting) == (free, 0, 0)
    assert not engine._loop.tickets


def test_after_warmup_nothing_compiles(engine):
    sizes = [program._cache_size() for program in engine._loop.programs]
    kinds = [{}, dict(top_p=0.5), dict(logprobs=3), dict(repetition_penalty=1.2), dict(temperature=0.0)]
    handles = [
        engine.submit([i % 4] * (1 + i), max_new_tokens=3 + i % 5, **{**TOKENS, **kinds[i % len(kinds)]})
        for i in range(64)
    ]
    for handle in handles:
        handle.result()
    assert sizes[1:] and [program._cache_size() for program in engine._loop.programs] == sizes


def test_after_warmup_nothing_compiles_for_weights_that_are_bound_to_a_device():
    lm = dataclasses.replace(TARGET, params=jax.device_put(TARGET.params, jax.devices()[0]))  # as loaded ones are
    with specjax.Engine(lm, **SIZES) as engine:
        engine.warmup()
        sizes = [program._cache_size() for program in engine._loop.programs]
        handles = [engine.submit([1] * count, **TOKENS) for count in (2, 100, 120)]  # one chunk, and two
        assert all(handle.result().tokens for handle in handles)
        assert [program._cache_size() for program in engine._loop.programs] == sizes


def test_the_smallest_engine_serves_and_warms_up():
    with specjax.Engine(TARGET, drafter="none", **{**SIZES, "capacity": 3}) as engine:
        engine.warmup()
        assert len(engine.submit([1], **TOKENS).result().tokens[0]) == 2


def test_lookup_with_penalties_is_plain_decoding():
    options = dict(max_new_tokens=40, temperature=0.0, repetition_penalty=1.2, no_repeat_ngram_size=4, ignore_eos=True)
    texts = []
    for drafter in ("ngram", "none"):
        with specjax.Engine(TARGET, drafter=drafter, block_width=4, **SIZES) as engine:
            texts.append(engine.submit(PROMPT * 4, **options).result().tokens)
    assert texts[0] == texts[1]


def test_counts_add_up(engine):
    before = engine.stats()
    results = [engine.submit(PROMPT, max_new_tokens=20, seed=i, **TOKENS) for i in range(5)]
    metrics = [handle.result().metrics[0] for handle in results]
    after = engine.stats()
    assert after.completion_tokens - before.completion_tokens == 100
    assert after.prompt_tokens - before.prompt_tokens == 25
    assert after.drafted - before.drafted == sum(m.num_draft_tokens for m in metrics)
    assert after.accepted - before.accepted == sum(m.num_accepted_tokens for m in metrics)
    assert after.spec_steps - before.spec_steps == sum(m.num_spec_steps for m in metrics)
    places = zip(after.accepted_per_position, before.accepted_per_position, strict=True)
    steps = [accepted for m in metrics for accepted in m.per_step_accepted]
    assert [a - b for a, b in places] == [sum(accepted > i for accepted in steps) for i in range(3)]
    assert after.finished["length"] - before.finished["length"] == 5


def test_a_long_prompt_stops_no_running_request():
    """Between two chunks of a long prompt, each running request gets a round."""
    with specjax.Engine(TARGET, drafter=TWIN, **{**SIZES, "capacity": 250}) as engine:
        seen, order = [], []
        read = Loop._read_chunk

        def reading(self):
            order.append("chunk")
            return read(self)

        engine._loop._read_chunk = reading.__get__(engine._loop)
        first = engine.submit(PROMPT, max_new_tokens=120, listener=lambda event: seen.append(event), **TOKENS)
        while not seen:
            time.sleep(0.01)
        dispatch = Loop._dispatch

        def dispatching(self):
            order.append("round")
            return dispatch(self)

        engine._loop._dispatch = dispatching.__get__(engine._loop)
        order.clear()
        second = engine.submit([1] * 240, max_new_tokens=2, **TOKENS)
        second.result(), first.result()
    chunks = [i for i, what in enumerate(order) if what == "chunk"]
    assert len(chunks) == 4 and all(b - a > 1 for a, b in itertools.pairwise(chunks))


def test_a_long_prompt_is_read_through_wider_and_wider_tables():
    asked = dict(prompt=[i * i % 4 for i in range(193)], max_new_tokens=40, seed=1, **TOKENS)
    with specjax.Engine(TARGET, drafter=TWIN, **{**SIZES, "capacity": 250}) as engine:
        expected = engine.submit(**asked).result()  # 16 pages and more: the whole table
        engine._loop.reads = [(1, 64), (2, 64), *engine._loop.reads]
        found = engine.submit(**asked, cache_salt="another, so that the prompt is read once more").result()
    assert found.tokens == expected.tokens and found.metrics == expected.metrics


def test_results_that_nobody_waits_for_are_given_up(engine):
    before = engine.stats().finished.get("abort", 0)
    results = engine.generate(dict(prompt=PROMPT, max_new_tokens=100, seed=i, **TOKENS) for i in itertools.count())
    next(results)
    results.close()
    assert engine.stats().finished["abort"] - before >= 2  # the window holds four requests


def test_results_come_as_requests_end_and_the_window_is_never_a_barrier(engine):
    drawn = []

    def requests():
        for i in range(12):
            drawn.append(i)
            yield dict(prompt=PROMPT, seed=i, max_new_tokens=60 if i == 0 else 2, **TOKENS)

    found = {}
    for index, result in engine.generate(requests()):
        found[index] = result.tokens[0]
        if len(found) == 1:
            assert len(drawn) <= 4  # twice the slots
    assert list(found)[0] != 0 and sorted(found) == list(range(12))
    assert found[5] == alone(engine, PROMPT, seed=5, max_new_tokens=2, **TOKENS).tokens[0]


def test_a_bad_request_gets_its_error_and_the_others_their_results(engine):
    bad = dict(prompt=PROMPT, logit_bias=dict.fromkeys(range(4), -np.inf), max_new_tokens=20, **TOKENS)
    good = dict(prompt=PROMPT, max_new_tokens=4, **TOKENS)
    requests = [good, 5, bad, dict(max_new_tokens=1), good, dict(prompt=[9]), dict(good, seed="no"), good]
    found = dict(engine.generate(requests))
    assert [type(found[i]).__name__ for i in range(len(requests))] == [
        "Result", "ValueError", "NoDistributionError", "ValueError", "Result", "ValueError", "ValueError", "Result",
    ]  # fmt: skip
    assert "must be a dict" in str(found[1]) and '"prompt"' in str(found[3])


def test_results_wait_for_room_in_a_queue_that_another_thread_has_filled():
    with specjax.Engine(TARGET, drafter="none", max_waiting=1, **SIZES) as engine:
        handles = [engine.submit(PROMPT, max_new_tokens=100, **TOKENS)]
        with contextlib.suppress(specjax.QueueFullError):
            while True:
                handles.append(engine.submit(PROMPT, max_new_tokens=100, **TOKENS))
        found = dict(engine.generate(dict(prompt=PROMPT, max_new_tokens=3, **TOKENS) for _ in range(5)))
        assert [len(found[i].tokens[0]) for i in range(5)] == [3] * 5
        assert all(len(handle.result().tokens[0]) == 100 for handle in handles)


def test_an_engine_can_be_full():
    with specjax.Engine(TARGET, drafter="none", max_waiting=1, **SIZES) as engine:
        handles, refused = [], 0
        for i in range(12):
            try:
                handles.append(engine.submit(PROMPT, max_new_tokens=100, seed=i, **TOKENS))
            except specjax.QueueFullError:
                refused += 1
        assert refused and all(len(handle.result().tokens[0]) == 100 for handle in handles)


def test_threads_may_submit_at_the_same_time(engine):
    found = {}

    def one(i):
        found[i] = engine.submit(PROMPT, max_new_tokens=10, seed=i, **TOKENS).result().tokens[0]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    expected = specjax.generate(
        engine.lm, [PROMPT] * 16, drafter=TWIN, num_speculative_tokens=3, block_width=4, max_new_tokens=10, seed=0,
        **TOKENS,
    )  # fmt: skip
    assert [found[i] for i in range(16)] == expected.tokens
