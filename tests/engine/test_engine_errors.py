"""Whatever fails or closes an engine, every request ends, and a request's own failure is nobody else's."""

import subprocess
import sys
import threading

import pytest
from drafter_table import TARGET

import specjax
from specjax.engine.handle import Handle

SIZES = dict(drafter="none", slots=2, capacity=128, prefill_chunk=64)
PROMPT = [1, 2, 3, 1, 2]
TOKENS = dict(ignore_eos=True, temperature=0.9)


def planted(*args):
    raise MemoryError("planted")


def gated(engine):
    """A gate before which the engine's thread waits, so that requests submitted meanwhile come together."""
    gate = threading.Event()
    engine._commands.put(gate.wait)
    return gate


def replace(engine, **programs):
    engine._loop.programs = engine._loop.programs._replace(**programs)


def check_all_learn_of(handles):
    for handle in handles:
        with pytest.raises(specjax.EngineClosedError, match="planted"):
            handle.result(20)


def test_an_error_of_the_engine_reaches_whoever_waits_and_frees_its_arrays():
    engine = specjax.Engine(TARGET, **SIZES)
    running = engine.submit(PROMPT, max_new_tokens=100, **TOKENS)
    next(running)
    replace(engine, round=planted)
    for wait in (running.result, lambda: list(running)):
        with pytest.raises(specjax.EngineClosedError, match="planted"):
            wait()
    with pytest.raises(specjax.EngineClosedError):
        engine.submit(PROMPT)
    engine.close()
    assert engine._loop.state is None and not engine._loop.in_flight


@pytest.mark.parametrize("program", ["stage", "feed", "join", "release"])
def test_an_error_reaches_requests_on_their_way_from_one_place_to_another(program):
    engine = specjax.Engine(TARGET, **SIZES)
    gate = gated(engine)
    replace(engine, **{program: planted})
    handles = [engine.submit(PROMPT, max_new_tokens=5 + i, **TOKENS) for i in range(4)]
    gate.set()
    check_all_learn_of(handles)


def test_an_error_reaches_everyone_although_an_abort_comes_too_late_to_be_obeyed():
    engine = specjax.Engine(TARGET, **SIZES)
    handles = [engine.submit(PROMPT, max_new_tokens=100, seed=i, **TOKENS) for i in range(4)]
    next(handles[0])

    def broken(*args):
        handles[0].abort()
        planted()

    replace(engine, release=planted, round=broken)  # the state was given to the round that failed
    check_all_learn_of(handles)


def test_an_error_of_one_command_reaches_the_requests_that_came_after_it():
    engine = specjax.Engine(TARGET, **SIZES)
    gate = gated(engine)
    engine._commands.put(planted)
    handles = [engine.submit(PROMPT, max_new_tokens=5, **TOKENS) for _ in range(3)]
    gate.set()
    check_all_learn_of(handles)


def test_whoever_asks_learns_of_the_error_itself(monkeypatch):
    engine = specjax.Engine(TARGET, **SIZES)
    monkeypatch.setattr(engine._loop, "compile_others", planted)
    with pytest.raises(MemoryError, match="planted"):
        engine.warmup()
    with pytest.raises(specjax.EngineClosedError):
        engine.submit(PROMPT)


def test_a_listener_that_raises_ends_its_own_request_alone():
    def listener(event):
        raise KeyError("of the listener")

    with specjax.Engine(TARGET, **SIZES) as engine:
        good = engine.submit(PROMPT, max_new_tokens=60, **TOKENS)
        bad = engine.submit(PROMPT, max_new_tokens=100, listener=listener, **TOKENS)
        with pytest.raises(KeyError, match="of the listener"):
            bad.result(60)
        assert len(good.result(60).tokens[0]) == 60
        assert engine.stats().finished == {"abort": 1, "length": 1}


def test_a_listener_that_has_raised_is_told_nothing_more():
    told, aborted = [], []

    def listener(event):
        told.append(event)
        raise KeyError("of the listener")

    handle = Handle("ticket", aborted.append, listener)
    for event in ("first", "second"):  # a round may commit several tokens before the abort is obeyed
        handle.tell(event)
    assert (told, aborted) == (["first"], ["ticket"])


def test_a_callback_that_raises_changes_nothing_but_the_log(caplog):
    def callback(handle):
        raise KeyError("of the callback")

    with specjax.Engine(TARGET, **SIZES) as engine:
        gate = gated(engine)
        handles = [engine.submit(PROMPT, max_new_tokens=4, **TOKENS) for _ in range(3)]
        handles[0].when_done(callback)
        gate.set()
        assert [len(handle.result(60).tokens[0]) for handle in handles] == [4, 4, 4]
    assert "of the callback" in caplog.text


def test_a_callback_may_ask_submit_and_close():
    engine, seen = specjax.Engine(TARGET, **SIZES), []

    def callback(handle):
        seen.append(engine.stats().running)
        seen.append(engine.submit(PROMPT, max_new_tokens=2, **TOKENS))
        engine.close()

    gate = gated(engine)
    handle = engine.submit(PROMPT, max_new_tokens=0, **TOKENS)
    handle.when_done(callback)
    gate.set()
    handle.result(60)
    engine.close()
    assert seen[0] == 0 and len(seen[1].result(60).tokens[0]) == 2
    assert engine.stats().finished == {"length": 2}


@pytest.mark.parametrize("drain, reason", [(True, "length"), (False, "abort")])
def test_closing_drains_or_aborts(drain, reason):
    engine = specjax.Engine(TARGET, **SIZES)
    handles = [engine.submit(PROMPT, max_new_tokens=100, seed=i, **TOKENS) for i in range(5)]
    engine.close(drain=drain)
    engine.close()
    assert {handle.result().finish_reasons[0] for handle in handles} == {reason}
    with pytest.raises(specjax.EngineClosedError):
        engine.submit(PROMPT)
    assert engine.stats().running == 0


def test_results_end_with_the_engine():
    other = specjax.Engine(TARGET, **SIZES)
    results = other.generate(dict(prompt=PROMPT, max_new_tokens=100, **TOKENS) for _ in range(9))
    next(results)
    other.close(drain=False)
    with pytest.raises(specjax.EngineClosedError):
        list(results)


def test_a_second_close_may_abort_what_the_first_one_drains():
    engine = specjax.Engine(TARGET, **SIZES)
    gate = gated(engine)
    handles = [engine.submit(PROMPT, max_new_tokens=120, seed=i, **TOKENS) for i in range(20)]
    drains = threading.Thread(target=engine.close)
    drains.start()
    while engine._open:
        pass
    aborts = threading.Thread(target=engine.close, kwargs=dict(drain=False))
    aborts.start()
    while engine._commands._calls.qsize() < 22:  # 20 requests, the end, and the aborts
        pass
    gate.set()
    drains.join(), aborts.join()
    assert {handle.result().finish_reasons[0] for handle in handles} == {"abort"}


def test_a_process_may_end_without_closing_its_engine():
    """At the end of a process a thread that uses the device is killed in the middle, and may take the process along."""
    code = """
import atexit, threading
atexit.register(lambda: print([t.name for t in threading.enumerate() if "specjax" in t.name]))
import specjax
from specjax.testing import tiny_lm
engine = specjax.Engine(tiny_lm(0), drafter="none", slots=1, capacity=256, prefill_chunk=64)
next(engine.submit([1], max_new_tokens=250, ignore_eos=True))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
