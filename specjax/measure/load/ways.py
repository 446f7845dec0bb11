"""The ways to an engine: directly, through the server's application in this process, or over HTTP."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from specjax.engine.engine import Engine
from specjax.engine.handle import Handle
from specjax.generation.result import Event
from specjax.measure.load.drive import Request
from specjax.measure.load.figures import Seen

PATH = "/v1/completions"
DONE = b"data: [DONE]"


class Directly:
    """Gives requests to an engine in this process."""

    def __init__(self, engine: Engine):
        self._engine, self._salts = engine, _salts("engine")

    async def __call__(self, request: Request) -> Callable[[], Seen]:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        arrivals: list[float] = []
        inside = False  # whether the last token was an accepted one, which another token of the same round follows

        def listen(event: Event) -> None:
            nonlocal inside
            if event.text and not inside:
                arrivals.append(time.perf_counter())
                inside = True
            inside = inside and event.from_draft

        def done(handle: Handle) -> None:
            loop.call_soon_threadsafe(ended.set)

        began = time.perf_counter()
        handle = self._engine.submit(
            request.prompt, max_new_tokens=request.max_tokens, temperature=request.temperature, seed=request.seed,
            ignore_eos=True, listener=listen, cache_salt=next(self._salts),
        )  # fmt: skip
        handle.when_done(done)
        await ended.wait()
        return partial(_seen_directly, began, arrivals, handle)


class ThroughTheApp:
    """Calls the server's application in this process, without a socket.

    Args:
      app: an ASGI application, which has started.
      model: the name of the model.
    """

    def __init__(self, app: Any, model: str):
        self._app, self._model, self._salts = app, model, _salts("app")

    async def __call__(self, request: Request) -> Callable[[], Seen]:
        began, status = time.perf_counter(), 0
        received: list[tuple[float, bytes]] = []
        first = [{"type": "http.request", "body": _body(request, self._model, next(self._salts)), "more_body": False}]
        over = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if first:
                return first.pop()
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            received.append((time.perf_counter(), message.get("body", b"")))

        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "path": PATH, "raw_path": PATH.encode(), "root_path": "", "scheme": "http", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "client": ("load", 1), "server": ("app", 80),
        }  # fmt: skip
        await self._app(scope, receive, send)
        return partial(_seen, began, status, received)


class OverHTTP:
    """Sends requests to an address.

    Args:
      address: of the server, without the path.
      model: the name of the model.
      key: an API key, or None.
    """

    def __init__(self, address: str, model: str, key: str | None):
        import httpx  # imported here, because no other way needs it

        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(
            base_url=address, headers=headers, timeout=None, limits=httpx.Limits(max_connections=None)
        )
        self._model, self._salts = model, _salts("http")

    async def __call__(self, request: Request) -> Callable[[], Seen]:
        began = time.perf_counter()
        received: list[tuple[float, bytes]] = []
        headers, body = {"Content-Type": "application/json"}, _body(request, self._model, next(self._salts))
        async with self._client.stream("POST", PATH, content=body, headers=headers) as response:
            async for part in response.aiter_raw():
                received.append((time.perf_counter(), part))
        return partial(_seen, began, response.status_code, received)


def _seen_directly(began: float, arrivals: list[float], handle: Handle) -> Seen:
    result = handle.result()
    assert result.texts is not None
    return Seen(began, arrivals, len(handle.prompt_tokens), len(result.tokens[0]), result.texts[0])


def _salts(name: str) -> Any:
    """A salt for each request, so that no request finds the pages of an earlier one with the same prompt."""
    return (f"load-{name}-{time.time_ns()}-{i}" for i in itertools.count())


def _body(request: Request, model: str, salt: str) -> bytes:
    """The body of a request that is streamed and says how many tokens it had."""
    fields = dict(
        model=model, prompt=request.prompt, max_tokens=request.max_tokens, temperature=request.temperature,
        seed=request.seed, ignore_eos=True, stream=True, stream_options={"include_usage": True}, cache_salt=salt,
    )  # fmt: skip
    return json.dumps(fields).encode()


def _seen(began: float, status: int, received: list[tuple[float, bytes]]) -> Seen:
    """What a stream brought."""
    if status != 200:
        return Seen(began, [], 0, 0, "", f"status {status}: {b''.join(part for _, part in received).decode()[:500]}")
    arrivals: list[float] = []
    usage: dict[str, int] = {}
    text, held, error, whole = "", b"", None, False
    for moment, part in received:
        *events, held = (held + part).split(b"\n\n")
        for event in events:
            if event == DONE:
                whole = True
                continue
            said = json.loads(event.removeprefix(b"data: "))
            error = error or (str(said["error"]["message"]) if "error" in said else None)
            usage = said.get("usage") or usage
            new = "".join(choice["text"] for choice in said.get("choices", []))
            arrivals += [moment] if new else []
            text += new
    error = error or (None if whole else "the stream has no end")
    return Seen(began, arrivals, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0), text, error)
