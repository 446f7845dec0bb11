"""Answers a request, as one JSON object or as a stream of server-sent events, while its client is there."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specjax.server.answer import Answer, Piece
from specjax.server.errors import as_refusal
from specjax.server.service import Service
from specjax.server.shape import Shape

CLIENT_GONE = 499  # the status of an answer that nobody reads any more
Value = TypeVar("Value")


async def respond(
    request: Request, service: Service, begin: Callable[[], tuple[Answer, Shape]], stream: bool
) -> Response:
    """The response to a request.

    Args:
      request: the request.
      service: the service.
      begin: checks the request and makes the answer, and how it looks. This may take a while.
      stream: whether the response is a stream.

    Raises:
      RefusedError: the engine refuses the request, or can't go on with it and the answer is no stream.
    """
    begun: list[Answer] = []
    cancelled = False

    def start() -> Shape:
        try:
            answer, shape = begin()
        except ValueError as error:  # the template or the tokenizer refuses the request
            raise as_refusal(error) from error
        begun.append(answer)
        service.answers.add(answer)
        answer.start()
        if cancelled:  # the thread goes on when its coroutine is cancelled
            _end(service, answer)
        return shape

    try:
        shape = await run_in_threadpool(start)  # all in one thread: every change of threads waits for Python's lock
    except BaseException:
        cancelled = True
        for answer in begun:
            _end(service, answer)
        raise
    [answer] = begun
    if stream:
        return _Stream(service, answer, shape)
    try:
        content = await unless_gone(_whole(answer, shape), request.receive)
    finally:
        _end(service, answer)
    return Response(status_code=CLIENT_GONE) if content is None else json_response(content)


def _end(service: Service, answer: Answer) -> None:
    """Ends an answer that nobody waits for any more. An answer that is over stays as it is."""
    answer.abort()
    service.answers.discard(answer)


def json_response(content: Any) -> Response:
    """A JSON response. Characters of other scripts stand as themselves."""
    return Response(_json(content), media_type="application/json")


async def unless_gone(work: Coroutine[Any, Any, Value], receive: Receive) -> Value | None:
    """The result of some work. None, as soon as the client has gone: the work is then cancelled."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole(answer: Answer, shape: Shape) -> dict[str, Any]:
    """The response without a stream, once all choices have ended."""
    found = [Piece(index) for index in range(answer.work.choices)]
    async for pieces in answer.pieces():
        for piece in pieces:
            found[piece.index].segments += piece.segments
            found[piece.index].tokens += piece.tokens
            found[piece.index].result = piece.result
    return shape.response(found, answer.usage())


class _Stream(Response):
    """A stream of server-sent events. A reader that is slow, or does not read, holds up nobody but itself."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, answer: Answer, shape: Shape):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._service, self._answer, self._shape = service, answer, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(OSError):  # the client has gone while something was sent
                await unless_gone(self._send(send), receive)
        finally:
            _end(self._service, self._answer)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for text in _events(self._answer, self._shape):
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(answer: Answer, shape: Shape) -> AsyncIterator[str]:
    """The text of the stream. An error on the way is an event, and the stream still ends as it should."""
    try:
        if opening := shape.opening():
            yield _written(opening)
        async for pieces in answer.pieces():
            chunks = [chunk for piece in pieces for chunk in shape.chunks(piece)]
            if chunks:
                yield _written(chunks)
        yield _written(shape.last(answer.usage()))
    except Exception as error:
        yield _written([as_refusal(error).body()])
    yield "data: [DONE]\n\n"


def _written(chunks: list[dict[str, Any]]) -> str:
    return "".join(f"data: {_json(chunk)}\n\n" for chunk in chunks)


# Made once: json.dumps with these settings would make a new encoder for each chunk.
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
