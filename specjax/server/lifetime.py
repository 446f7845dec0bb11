"""Runs the server until a signal ends it: binds, says where it is, drains, and frees everything."""

import asyncio
import os
import signal
import socket
from typing import Any

import uvicorn

from specjax.report import progress
from specjax.server.app import create
from specjax.server.service import Service

LAST_WORDS = 5  # seconds in which answers that were cut off may still be sent


class _Server(uvicorn.Server):
    """As its base, but a signal lets running answers end before the server closes its doors."""

    def __init__(self, config: uvicorn.Config, service: Service, address: str, timeout: float):
        super().__init__(config)
        self._service, self._address, self._timeout = service, address, timeout
        self._announced = False
        self._draining: asyncio.Task | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Called by the main thread at a signal. The first one drains; the second one ends the process at once.

        While the model is loading nobody is answered, so the first one ends the process too. A thread that loads or
        compiles can't be stopped in another way.
        """
        if self._service.stage == "loading":
            os._exit(0)
        if self._service.draining:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self._service.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second. -> whether to end."""
        service = self._service
        if service.stage == "ready" and not self._announced:
            self._announced = True
            progress.say(f"specjax serves {service.names[0]} at {self._address}")
        if service.draining and self._draining is None:
            self._draining = asyncio.create_task(service.drain(self._timeout))
        over = service.failure is not None or (self._draining is not None and self._draining.done())
        return over or await super().on_tick(counter)


def serve(service: Service, host: str, port: int, timeout: float) -> None:
    """Serves until SIGTERM or SIGINT. Then new requests are refused, and running ones may end.

    Args:
      service: the service; the server loads its engine.
      host, port: where to listen. Port 0 takes a free one.
      timeout: the seconds after which running answers are cut off.

    Raises:
      OSError: the address can't be used.
      Exception: whatever the engine's making raised.
    """
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listening.getsockname()[1]}"
        config = uvicorn.Config(
            create(service), log_config=None, log_level="warning", access_log=False, server_header=False,
            timeout_graceful_shutdown=LAST_WORDS,
        )  # fmt: skip
        _Server(config, service, address, timeout).run(sockets=[listening])
    if service.failure is not None:
        raise service.failure
