"""Carries items from the engine's thread to coroutines of one event loop. Putting an item never waits for a reader."""

import asyncio
import contextlib
from collections import deque
from typing import Any


class Mailbox:
    """The items for one coroutine."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._ready = asyncio.Event()

    def add(self, item: Any) -> None:
        """Adds an item. Called by the event loop."""
        self._items.append(item)
        self._ready.set()

    async def take(self) -> list[Any]:
        """All items that are there, at least one. Waits for the first."""
        await self._ready.wait()
        self._ready.clear()
        items, self._items = self._items, []
        return items


class Bridge:
    """Wakes the event loop once for all items that come while it is busy: mostly once a round of the engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._items: deque[tuple[Mailbox, Any]] = deque()
        self._told = False  # whether the loop will look

    def put(self, mailbox: Mailbox, item: Any) -> None:
        """Sends an item to a mailbox. Any thread may call this."""
        self._items.append((mailbox, item))
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._told = False  # before looking: an item that comes from now on wakes the loop again
        while self._items:
            mailbox, item = self._items.popleft()
            mailbox.add(item)
