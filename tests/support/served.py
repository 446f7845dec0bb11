"""A tiny model with a tokenizer of bytes behind the server, and clients of it in this process."""

import asyncio
import contextlib
import dataclasses
import json
import threading
import time

import httpx
import uvicorn
from small_tokenizers import byte_level

import specjax
from specjax import testing
from specjax.server.app import create
from specjax.server.service import Service

TOKENIZER = byte_level(add_bos=False)
SIZE, CAPACITY = 3, 250


def tiny(seed=0, **overrides):
    """A random model over single bytes, which ends texts now and then."""
    config = {"vocab_size": len(TOKENIZER), "max_position_embeddings": 256, "eos_token_ids": (1,), **overrides}
    return dataclasses.replace(testing.tiny_lm(seed, **config), tokenizer=TOKENIZER)


LM = tiny()


def engine(lm=LM, **options):
    given = dict(slots=4, capacity=CAPACITY, prefill_chunk=64, num_speculative_tokens=SIZE, max_logprobs=5)
    return specjax.Engine(lm, drafter="ngram", **{**given, **options})


def alone(prompt, lm=LM, **options):
    """What ``generate`` gives at the engine's block width."""
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    given = dict(drafter="ngram", num_speculative_tokens=SIZE, block_width=SIZE + 1, capacity=CAPACITY)
    return specjax.generate(lm, [ids], **{"temperature": 1.0, **given, **options})


@contextlib.asynccontextmanager
async def running(make=engine, ready=True, **options):
    """The application, with its engine loaded unless ``ready`` is False."""
    service = Service(make, ["tiny"], **options)
    app = create(service)
    async with app.router.lifespan_context(app):
        while ready and service.stage == "loading":
            await asyncio.sleep(0.01)
        yield app


def client(app, raises=False, **options):
    """An httpx client of an application in this process. It gets each response whole.

    If ``raises``, what the application raises through to its server is raised here. A refusal must not be.
    """
    transport = httpx.ASGITransport(app, raise_app_exceptions=raises)
    return httpx.AsyncClient(transport=transport, base_url="http://tiny", timeout=120, **options)


def events(text):
    """The events of a stream, parsed; the last one is [DONE]."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]", text
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class Caller:
    """A client that speaks ASGI by hand: it may stop reading after some bytes, or go away in the middle."""

    def __init__(self, app, path, body, reads=None, headers=()):
        self.sent, self.reads, self.status = b"", reads, None
        self.gone, self.goes_on = asyncio.Event(), asyncio.Event()
        self._first = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        headers = [(b"content-type", b"application/json"), *headers]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "path": path, "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"",
            "headers": headers, "client": ("test", 1), "server": ("tiny", 80), "app": app,
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self):
        if self._first:
            return self._first.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.status = message.get("status", self.status)
        self.sent += message.get("body", b"")
        if self.reads is not None and len(self.sent) > self.reads:
            await self.goes_on.wait()  # the reader's buffer is full


@contextlib.contextmanager
def real_server(service):
    """The application behind uvicorn on a free port, in a thread. -> its address."""
    config = uvicorn.Config(create(service), port=0, log_config=None, log_level="warning", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not (server.started and service.stage == "ready"):
        time.sleep(0.01)
        assert thread.is_alive() and service.failure is None, service.failure
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
