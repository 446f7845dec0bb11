"""An overcommitted engine swaps requests out and in again, and nobody can tell by their tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
from drafter_table import DRAFTERS, TARGET, TARGETS, pairs

import specjax
from specjax.engine import saved, swap
from specjax.engine.loop import Loop
from specjax.models.cache import PAGE

SIZES = dict(slots=4, capacity=250, prefill_chunk=64, num_speculative_tokens=3, overcommit=True)
# By default a drafter that has a cache and an output of its own. Prompt lookup has no state.
QUICK = {("head", "rejection")}


def started(drafter, verifier="rejection", **sizes):
    target = TARGETS.get(drafter, TARGET)
    return specjax.Engine(target, drafter=DRAFTERS[drafter], verifier=verifier, **{**SIZES, **sizes})


def requests(engine, count=11):
    """Requests at T = 1 that grow by pages, some with a common prefix of more than a page."""
    rng = np.random.default_rng(3)
    prefix = rng.integers(0, 4, 70).tolist()
    prompts = [prefix * (i % 3 == 0) + rng.integers(0, 4, 5 + 17 * (i % 4)).tolist() for i in range(count)]
    given = dict(temperature=1.0, ignore_eos=True, logprobs=True)
    new = [min(90 + 5 * i, engine.longest - len(prompt)) for i, prompt in enumerate(prompts)]
    return [dict(prompt=prompt, seed=i, max_new_tokens=new[i], **given) for i, prompt in enumerate(prompts)]


def some_prompt(size):
    return np.random.default_rng(8).integers(0, 4, size).tolist()


@pytest.fixture
def swapped(monkeypatch):
    """(ticket, its slot or None, all that had pages) of each request that is swapped out."""
    monkeypatch.setenv("SPECJAX_CHECK", "1")
    found, take_out = [], swap._swap_out

    def taking_out(loop, ticket):
        found.append((ticket, ticket.slot, [t for t in [loop.staged, *loop.running] if t]))
        take_out(loop, ticket)

    monkeypatch.setattr(swap, "_swap_out", taking_out)
    return found


@pytest.mark.parametrize("drafter, verifier", pairs(QUICK))
def test_a_request_that_was_swapped_out_has_the_tokens_and_bits_it_has_alone(drafter, verifier, swapped, monkeypatch):
    if drafter != "prompt lookup":  # with checks a fault is an error of the engine; here it shows in a text
        monkeypatch.delenv("SPECJAX_CHECK")
    with started(drafter, verifier, kv_tokens=5 * PAGE) as engine:
        engine.warmup()
        sizes, free = [p._cache_size() for p in engine._loop.programs], engine.stats().free_kv_tokens
        alone = [engine.submit(**request).result(300) for request in requests(engine)]
        assert not swapped
        handles = [engine.submit(**request) for request in requests(engine)]
        together = [handle.result(300) for handle in handles]
        assert [p._cache_size() for p in engine._loop.programs] == sizes
        stats = engine.stats()
    for i, (one, other) in enumerate(zip(together, alone, strict=True)):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs, i
        assert one.metrics[0].to_dict() == other.metrics[0].to_dict()
    assert stats.swaps == sum(slot is not None for _, slot, _ in swapped) > 3
    assert any(ticket.slot not in (None, slot) for ticket, slot, _ in swapped)  # some went on in another slot
    assert all(ticket.place == max(other.place for other in present) for ticket, _, present in swapped)
    assert handles[0]._ticket not in [ticket for ticket, _, _ in swapped]  # the oldest one is never held up
    assert (stats.free_kv_tokens, stats.running, stats.waiting) == (free, 0, 0)
    assert not any(handle._ticket.saved for handle in handles)


def test_a_request_has_pages_for_all_tokens_that_rounds_in_flight_may_add():
    loop = SimpleNamespace(overcommit=True, headroom=4, decoder=SimpleNamespace(num_speculative_tokens=3))
    ticket = SimpleNamespace(length=PAGE - 7, limit=500, pages=[1])
    loop.in_flight = [None]
    assert Loop.missing(loop, ticket) == 1  # PAGE - 7 + 4 + 4 entries
    ticket.limit = PAGE - 4
    assert Loop.missing(loop, ticket) == 0  # nothing is added past the limit
    loop.in_flight, ticket.limit = [], 500
    assert Loop.missing(loop, ticket) == 0
    loop.overcommit = False
    assert Loop.missing(loop, ticket) == -(-504 // PAGE) - 1


def test_every_page_with_an_entry_is_saved():
    programs = SimpleNamespace(take_row=lambda state, slot: None, read_pages=lambda state, pages: pages)
    for length in (2, 64, 65, 66, 129, 130, 700):  # the last token has no entry yet
        ticket = SimpleNamespace(slot=0, length=length, pages=list(range(3, 20)))
        kept = np.concatenate(saved.request_of(programs, None, ticket).groups).tolist()
        assert kept == ticket.pages[: len(kept)] and len(kept) * PAGE >= length - 1


def test_requests_may_be_aborted_while_they_are_swapped_out_or_read(swapped, monkeypatch):
    with started("prompt lookup", kv_tokens=5 * PAGE) as engine:
        take_out = swap._swap_out

        def aborting(loop, ticket):
            take_out(loop, ticket)
            if len(swapped) % 2:
                ticket.handle.abort()

        monkeypatch.setattr(swap, "_swap_out", aborting)
        free, given = engine.stats().free_kv_tokens, requests(engine, 11)
        handles = [engine.submit(**request) for request in given]
        results = [handle.result(300) for handle in handles]
        reasons = [result.finish_reasons[0] for result in results]
        assert 0 < reasons.count("abort") == sum(i % 2 == 0 for i in range(len(swapped)))
        assert not any(handle._ticket.saved for handle in handles)
        for request, result in zip(given, results, strict=True):
            alone = engine.submit(**request).result(300).tokens[0]
            assert result.tokens[0] == alone[: len(result.tokens[0])]
        assert engine.stats().free_kv_tokens == free


def test_samples_that_wait_go_on_from_the_prompt_although_another_was_swapped_out_meanwhile(swapped):
    older = dict(prompt=[1, 2, 3], max_new_tokens=240, temperature=1.0, ignore_eos=True)
    given = dict(prompt=some_prompt(70), max_new_tokens=60, temperature=1.0, ignore_eos=True)
    with started("prompt lookup", slots=2, kv_tokens=5 * PAGE) as engine:
        alone = [engine.submit(**given, seed=seed).result(300).tokens for seed in (5, 6, 7)]
        handles = []

        def told(event):  # the samples come while the older request still has a page or two
            if len(handles) == 0 and len(seen) > 30:
                handles.extend(engine.submit_many(**given, n=3, seed=5))
            seen.append(event)

        seen: list = []
        engine.submit(**older, listener=told).result(300)
        assert [handle.result(300).tokens for handle in handles] == alone
    assert swapped[0][0] in [handle._ticket for handle in handles[:2]]  # while the last one waited


def test_a_request_whose_prompt_is_being_read_gives_its_pages_back_and_is_read_again(swapped):
    first = dict(prompt=[1, 2, 3], max_new_tokens=200, temperature=1.0, ignore_eos=True, seed=1)
    second = dict(prompt=[1, 3] * 100, max_new_tokens=9, temperature=1.0, ignore_eos=True, seed=2)
    with started("prompt lookup", slots=2) as engine:
        loop, handles = engine._loop, []
        alone = [engine.submit(**{**given, "cache_salt": "alone"}).result(300).tokens for given in (first, second)]

        def told(event):
            if not handles:
                handles.append(engine.submit(**second))
            if loop.staged and loop.staged.read > 64 and not swapped:
                swap._swap_out(loop, loop.staged)

        found = [engine.submit(**first, listener=told).result(300).tokens, handles[0].result(300).tokens]
        assert found == alone and [slot for _, slot, _ in swapped] == [None]
        stats = engine.stats()
    assert (stats.prompt_tokens, stats.swaps) == (2 * 203, 0)


def test_an_overcommitted_engine_starts_more_requests_and_refuses_what_can_never_fit():
    counts = []
    for overcommit in (False, True):
        with started("prompt lookup", kv_tokens=4 * PAGE, overcommit=overcommit) as engine:
            with pytest.raises(ValueError, match="at most 250"):
                engine.submit([1] * 10, max_new_tokens=241)
            options = dict(max_new_tokens=240, temperature=1.0, ignore_eos=True)
            running: list = []

            def count(sample, event, loop=engine._loop, running=running):
                running.append(sum(map(bool, loop.running)))

            handles = engine.submit_many([1], 3, listener=count, **options)
            assert [len(handle.result(300).tokens[0]) for handle in handles] == [240] * 3
            counts.append(max(running))
    assert counts == [1, 2]
