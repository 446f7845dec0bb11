"""What every request passes first: the key, the server's stage, and the size of its body."""

import contextlib
import hashlib
import hmac
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specjax.server.errors import RefusedError
from specjax.server.service import Service

MAX_BODY = 8 * 1024 * 1024  # bytes
OPEN = ("/", "/health", "/metrics", "/version", "/openapi.json")  # paths that need no key
REPORT = "/report/"  # an answer's report needs no key either: its address is the answer's random id


class Gate:
    """An ASGI middleware. Requests with a body are let in one way: with a key, while the server is ready, if small."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if scope["path"] not in OPEN and not scope["path"].startswith(REPORT):
                scope.setdefault("state", {})["salt"] = self._check_key(headers)
            if scope["method"] != "POST":
                await self._app(scope, receive, send)
                return
            self._service.check_open()
            with self._counted():
                body = await _body(headers, receive)
                if body is not None:
                    await self._app(scope, _replayed(body, receive), send)
        except RefusedError as error:
            await error.response()(scope, receive, send)

    @contextlib.contextmanager
    def _counted(self) -> Any:
        """Counts a request as running."""
        self._service.running += 1
        try:
            yield
        finally:
            self._service.running -= 1

    def _check_key(self, headers: Headers) -> str:
        """What separates a client's cache pages from those of other keys. Raises RefusedError if no key is right."""
        if not self._service.keys:
            return ""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # The bytes as they came: the header was decoded as Latin-1.
        digest = hashlib.sha256(given.strip().encode("latin-1")).digest()
        # Each comparison takes the same time whether it fits or not, and all are made.
        fits = [hmac.compare_digest(digest, key) for key in self._service.keys]
        if scheme.lower() != "bearer" or not any(fits):
            raise RefusedError(401, "give a right key: Authorization: Bearer KEY", code="invalid_api_key")
        return digest.hex()


async def _body(headers: Headers, receive: Receive) -> bytes | None:
    """The whole body. None: the client went away before its end. Raises RefusedError if the body is too large."""
    too_large = RefusedError(413, f"the body must be at most {MAX_BODY} bytes", code="body_too_large")
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > MAX_BODY:
        raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            raise too_large
        if not message.get("more_body"):
            return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body first, and then what comes after it."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again
