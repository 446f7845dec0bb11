"""What goes wrong in the life of a server: each fault ends as it should, and nobody else notices."""

import asyncio
import dataclasses
import gc
import sys
import threading
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from served import LM, Caller, alone, client, engine, events, running

from specjax.server import process
from specjax.server.respond import respond

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = dict(prompt="abc", max_tokens=240, ignore_eos=True, seed=3)


class Paced:
    """Makes an engine whose rounds wait until the test lets them go."""

    def __init__(self, **options):
        self.engine = engine(**options)
        self._go = threading.Semaphore(0)
        self._dispatch = self.engine._loop._dispatch

    def __call__(self):
        def paced():
            if not self._go.acquire(timeout=60):
                raise TimeoutError("the test let no round go")
            self._dispatch()

        self.engine.warmup()
        self.engine.warmup = lambda: None
        self.engine._loop._dispatch = paced
        return self.engine

    def let(self, rounds):
        self._go.release(rounds)

    def free(self):
        self._go.release(1 << 20)


async def until(condition, seconds=60):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def run(coroutine):
    return asyncio.run(coroutine)


def test_pauses_of_pythons_own_are_short_while_the_server_runs_and_as_before_after_it():
    async def whole():
        async with running():
            return gc.get_freeze_count(), sys.getswitchinterval()

    usual = gc.get_freeze_count(), sys.getswitchinterval()
    left_alone, interval = run(whole())
    assert left_alone > 10_000 and interval < usual[1]
    assert (gc.get_freeze_count(), sys.getswitchinterval()) == usual


def test_the_settings_of_the_process_are_there_until_the_last_server_ends():
    usual = sys.getswitchinterval()
    one, other = process.settings(), process.settings()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert sys.getswitchinterval() < usual
    other.__exit__(None, None, None)
    assert sys.getswitchinterval() == usual


@pytest.mark.parametrize("when", ["while it is checked", "once it has begun"])
def test_a_request_that_is_cancelled_before_its_answer_begins_leaves_nothing(when):
    """The thread that begins the answer can't be stopped, so the answer is ended there."""
    reached, go, ended = threading.Event(), threading.Event(), []

    class Slow:
        def start(self):
            self.wait("once it has begun")

        def abort(self):
            ended.append(self)

        def wait(self, point):
            if when == point:
                reached.set()
                assert go.wait(60)

    answer, service = Slow(), SimpleNamespace(answers=set())

    def begin():
        answer.wait("while it is checked")
        return answer, None

    async def whole():
        task = asyncio.ensure_future(respond(None, service, begin, True))
        await asyncio.to_thread(reached.wait, 60)
        task.cancel()
        await asyncio.sleep(0.01)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: ended and not service.answers)

    run(whole())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot_within_two_rounds(stream):
    async def whole():
        paced = Paced(slots=1)
        async with running(paced) as app:
            loop = paced.engine._loop
            caller = Caller(app, PATH, {**LONG, "stream": stream})
            paced.let(3)
            await until(lambda: any(loop.running) and loop.counts.rounds >= 3)
            caller.gone.set()
            await caller.task
            await until(lambda: len(paced.engine._commands) or not any(loop.running))
            paced.let(2)
            await until(lambda: loop.counts.finished.get("abort") == 1)
            assert not any(loop.running) and app.state.service.running == 0
            paced.free()
            assert paced.engine.stats().free_kv_tokens == paced.engine.stats().kv_tokens

    run(whole())


def test_a_reader_that_is_slow_holds_nobody_up_and_loses_nothing():
    async def whole():
        async with running() as app:
            slow = Caller(app, PATH, {**LONG, "stream": True}, reads=500)
            await until(lambda: len(slow.sent) > 500)
            async with client(app) as other:
                assert (await other.post(PATH, json=LONG)).status_code == 200
            await until(lambda: app.state.service.engine.stats().running == 0)
            assert not slow.task.done()
            slow.goes_on.set()
            await slow.task
            text = "".join(event["choices"][0]["text"] for event in events(slow.sent.decode()))
            assert text == alone("abc", seed=3, max_new_tokens=240, ignore_eos=True).texts[0]

    run(whole())


def test_a_full_queue_refuses_and_says_when_to_come_back():
    async def whole():
        paced = Paced(slots=1, max_waiting=2)
        async with running(paced) as app, client(app) as one:
            asks = [asyncio.create_task(one.post(PATH, json={**LONG, "seed": seed})) for seed in range(8)]
            await until(lambda: sum(ask.done() for ask in asks) >= 5)
            paced.free()
            answers = [await ask for ask in asks]
            refused = [answer for answer in answers if answer.status_code == 429]
            assert len(refused) >= 5 and all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
            assert refused[0].json()["error"]["code"] == "queue_full"
            for seed, answer in enumerate(answers):
                if answer.status_code == 200:
                    expected = alone("abc", seed=seed, max_new_tokens=240, ignore_eos=True)
                    assert answer.json()["choices"][0]["text"] == expected.texts[0]

    run(whole())


def test_of_a_request_that_the_queue_refuses_in_part_no_part_is_left():
    async def whole():
        paced = Paced(slots=1, max_waiting=2)
        async with running(paced) as app, client(app) as one:
            refused = await one.post(PATH, json={**LONG, "n": 8})  # samples of one prompt wait together or not at all
            assert refused.status_code == 400 and "n must be an integer from 1" in refused.text
            assert paced.engine.stats().waiting == 0
            assert (await one.post(PATH, json={**LONG, "prompt": ["abc"] * 8})).status_code == 429
            paced.let(3)
            loop = paced.engine._loop
            await until(lambda: loop.counts.finished.get("abort", 0) > 1)
            await until(lambda: not (any(loop.running) or loop.waiting or len(paced.engine._commands)))
            paced.free()

    run(whole())


def planted(token):
    """The model with NaN in the embedding of one token."""
    table = np.array(LM.params["embed"])
    table[token] = np.nan
    return dataclasses.replace(LM, params={**LM.params, "embed": jnp.asarray(table)})


def test_a_row_of_nan_ends_alone_with_an_error():
    async def whole():
        async with running(lambda: engine(planted(70))) as app, client(app) as one:
            good = asyncio.create_task(one.post(PATH, json={**LONG, "logit_bias": {"70": -100}}))
            bad = await one.post(PATH, json=dict(prompt=[60, 70, 61], max_tokens=20))
            assert bad.status_code == 500 and bad.json()["error"]["code"] == "no_distribution"
            text = (await one.post(PATH, json=dict(prompt=[60, 70, 61], max_tokens=20, stream=True))).text
            assert events(text)[-1]["error"]["code"] == "no_distribution"
            scored = await one.post(PATH, json=dict(prompt=[60, 70, 61], max_tokens=1, echo=True, logprobs=1))
            assert scored.status_code == 500 and scored.json()["error"]["code"] == "no_distribution"
            expected = alone("abc", planted(70), seed=3, max_new_tokens=240, ignore_eos=True, logit_bias={70: -100.0})
            assert (await good).json()["choices"][0]["text"] == expected.texts[0]

    run(whole())


def test_an_engine_that_breaks_is_told_to_all():
    def broken(*args):
        raise MemoryError("planted")

    async def whole():
        paced = Paced(slots=2)
        async with running(paced) as app, client(app) as one:
            asks = [asyncio.create_task(one.post(PATH, json={**LONG, "stream": s})) for s in (False, True)]
            while not all(paced.engine._loop.running):  # the second request may come after any number of rounds
                paced.let(1)
                await asyncio.sleep(0.02)
            loop = paced.engine._loop
            loop.programs = loop.programs._replace(round=broken)
            paced.free()
            plain, stream = [await ask for ask in asks]
            assert plain.status_code == 500 and plain.json()["error"]["code"] == "engine_broken"
            assert stream.status_code == 200 and events(stream.text)[-1]["error"]["code"] == "engine_broken"
            later = await one.post(PATH, json=LONG)
            assert later.status_code == 500 and later.json()["error"]["code"] == "engine_broken"
            health = await one.get("/health")
            assert health.status_code == 503 and health.json() == {"status": "broken"}

    run(whole())


def test_a_server_that_loads_says_so():
    go = threading.Event()

    def slow():
        go.wait(60)
        return engine()

    async def whole():
        async with running(slow, ready=False) as app, client(app) as one:
            for ask in (one.post(PATH, json=LONG), one.get("/v1/models"), one.get("/metrics"), one.post("/tokenize")):
                answer = await ask
                assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
            health = await one.get("/health")
            assert health.status_code == 503 and health.json() == {"status": "loading"}
            assert (await one.get("/version")).status_code == 200
            go.set()
            await until(lambda: app.state.service.stage == "ready")
            assert (await one.get("/health")).status_code == 200
            assert (await one.post(PATH, json=LONG)).status_code == 200

    run(whole())


def test_a_model_without_a_tokenizer_is_refused():
    async def whole():
        async with running(lambda: engine(dataclasses.replace(LM, tokenizer=None))) as app:
            assert app.state.service.stage == "broken" and "tokenizer" in str(app.state.service.failure)

    run(whole())


@pytest.mark.parametrize("patient", [True, False])
def test_draining_ends_running_answers_or_cuts_them_off_and_lets_nobody_in(patient):
    async def whole():
        paced = Paced()
        async with running(paced) as app, client(app) as one:
            service = app.state.service
            asks = [asyncio.create_task(one.post(PATH, json={**LONG, "stream": s})) for s in (False, True)]
            while sum(map(bool, paced.engine._loop.running)) < 2:
                paced.let(1)
                await asyncio.sleep(0.02)
            draining = asyncio.create_task(service.drain(60 if patient else 0.1))
            await until(lambda: service.stage == "draining")
            refused = await one.post(PATH, json=LONG)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
            assert (await one.get("/health")).json() == {"status": "draining"}
            assert (await one.get("/v1/models")).status_code == 200
            if not patient:
                await draining
            paced.free()
            await draining
            plain, stream = [await ask for ask in asks]
            if patient:
                text = alone("abc", seed=3, max_new_tokens=240, ignore_eos=True).texts[0]
                assert plain.json()["choices"][0]["text"] == text
                assert "".join(event["choices"][0]["text"] for event in events(stream.text)) == text
            else:
                assert plain.status_code == 503 and plain.json()["error"]["code"] == "shutting_down"
                assert events(stream.text)[-1]["error"]["code"] == "shutting_down"

    run(whole())


def test_several_samples_end_together_if_the_client_leaves():
    async def whole():
        async with running() as app:
            caller = Caller(app, CHAT, dict(messages=[{"role": "user", "content": "a"}], n=12, max_tokens=230,
                                            ignore_eos=True, stream=True))  # fmt: skip
            await until(lambda: len(caller.sent) > 5000)
            caller.gone.set()
            await caller.task
            service = app.state.service
            await until(lambda: service.engine.stats().running + service.engine.stats().waiting == 0)
            assert service.engine.stats().free_kv_tokens == service.engine.stats().kv_tokens
            assert not service.answers and service.running == 0

    run(whole())


def test_an_unforeseen_error_is_a_json_error(monkeypatch):
    def planted_error(*args):
        raise KeyError("planted")

    monkeypatch.setattr("specjax.server.completions.work", planted_error)

    async def whole():
        async with running() as app, client(app) as one:
            answer = await one.post(PATH, json=LONG)
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
            assert "planted" not in answer.text

    run(whole())
