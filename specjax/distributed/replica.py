"""The processes that share one model: what they tell each other, and how they leave together."""

import atexit
import queue
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import numpy as np

from specjax.distributed.calls import Calls
from specjax.distributed.channel import Channel
from specjax.distributed.watch import Watch

DEPTH = 4  # calls that may be on the way at once; hundreds of collectives in flight hang
BEAT = 1.0  # seconds between two signs of life


class Replica:
    """This process's part of the replica. :func:`specjax.distributed.join` makes it.

    Rank 0 has a channel to each other rank, and each other rank has a channel to rank 0.

    Args:
      rank: this process's rank.
      channels: the channels, by the rank at the other end.
      names: the host and the process id of each rank.
      silence, stuck: as in :class:`specjax.distributed.watch.Watch`.
    """

    def __init__(self, rank: int, channels: dict[int, Channel], names: dict[int, str], silence: float, stuck: float):
        self.rank, self.size = rank, len(names)
        self._channels = channels
        self._engines: list[Calls] = []
        self._messages: queue.SimpleQueue[tuple[dict[str, Any], list[np.ndarray]]] = queue.SimpleQueue()
        self._order, self._number = threading.Lock(), 0
        self._room = threading.Semaphore(DEPTH)
        self._started: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._staying = set(channels)  # the ranks that have not said good-bye
        self._watch = Watch(rank, names, silence, stuck, self._tell_reachable)
        self._finisher = threading.Thread(target=self._finish, name="specjax results", daemon=True)
        listeners = [threading.Thread(target=self._listen, args=(peer,), daemon=True) for peer in channels]
        for thread in (self._finisher, threading.Thread(target=self._beat, daemon=True), *listeners):
            thread.start()
        atexit.register(self._leave)  # before JAX's own, which would wait for the others

    def __enter__(self) -> "Replica":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()  # after an error the process ends, and all others with it

    def calls(self) -> Calls:
        """The programs of one more engine, for ``specjax.Engine(calls=...)``. Every rank makes the same engines."""
        self._engines.append(Calls(self, len(self._engines)))
        return self._engines[-1]

    def agreed(self, value: Any) -> Any:
        """The value of rank 0, on every rank: what JSON holds. Every rank calls this, before it follows."""
        if self.rank == 0:
            self.tell({"value": value})
            return value
        return self._messages.get()[0]["value"]

    def follow(self) -> None:
        """On another rank than 0, after its engines are made: makes the calls of rank 0, until rank 0 closes.

        SIGINT and SIGTERM are ignored from then on: rank 0 gets them too, and decides when all end.

        Raises:
          ValueError: this is rank 0, which leads.
        """
        if self.rank == 0:
            raise ValueError("rank 0 leads; only the other ranks follow")
        if threading.current_thread() is threading.main_thread():
            for one in (signal.SIGINT, signal.SIGTERM):  # launchers send these to all ranks
                signal.signal(one, lambda number, frame: None)
        while True:
            head, arrays = self._messages.get()
            if "bye" in head:
                return self.close()
            self._room.acquire()
            try:
                self._engines[head["of"]].follow(head, arrays)
            except Exception as problem:
                self.end(f"call {head['call']} ({head['name']}) has failed: {problem!r}")

    def close(self) -> None:
        """Leaves the replica, after its engines are closed. Rank 0 lets the others leave first, and waits for them."""
        if self._closed.is_set():
            return
        self._started.put(None)
        if self.rank == 0:
            self.tell({"bye": True})
            if self._channels:
                self._closed.wait()
            self._closed.set()
        else:
            self._finisher.join()
            self.tell({"bye": True})
            self._closed.set()

    def end(self, problem: str) -> None:
        """Ends all processes of the replica at once, by :meth:`specjax.distributed.watch.Watch.end`."""
        self._watch.end(problem)

    @contextmanager
    def turn(self) -> Iterator[int]:
        """The number of a call of rank 0. All calls have one order, also those of several engines."""
        self._room.acquire()
        with self._order:
            self._number += 1
            try:
                yield self._number
            except Exception as problem:  # the other ranks may have made the call already, and would wait for ever
                self.end(f"call {self._number} has failed: {problem!r}")

    def tell(self, head: dict[str, Any], arrays: list[np.ndarray] | None = None) -> None:
        """Sends a message to every peer."""
        for peer, channel in self._channels.items():
            try:
                channel.send(head, arrays or ())
            except OSError:
                self._watch.gone(peer)

    def started(self, number: int, name: str, shown: Any) -> None:
        """This rank has dispatched a call, whose results for the host are ``shown``."""
        self._watch.started(self.rank, number, name)
        self._started.put((number, shown))

    def digest(self, shown: Any) -> int:
        """A number that differs if the results of a call differ."""
        found = 0
        for leaf in jax.tree.leaves(shown):
            found = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), found)
        return found

    def _leave(self) -> None:
        """At the end of the process: if the replica was not closed, the others must not wait for this process."""
        if not self._closed.is_set():
            self.end("the process ends without closing its part of the replica")

    def _finish(self) -> None:
        """A thread: waits for the results of each call, and tells rank 0 their digest."""
        while (entry := self._started.get()) is not None:
            number, shown = entry
            try:
                found = self.digest(jax.device_get(shown))
            except Exception as problem:
                time.sleep(BEAT)  # mostly a peer has gone; the thread that listens to the peer names it
                self.end(f"the results of call {number} can't be read: {problem}")
            self._room.release()
            self._watch.finished(self.rank, number, found)
            if self.rank:
                self.tell({"done": number, "digest": found})

    def _listen(self, peer: int) -> None:
        """A thread: reads the messages of one peer, until it says good-bye."""
        head: dict[str, Any] = {}
        while "bye" not in head:
            try:
                head, arrays = self._channels[peer].receive()
            except OSError:
                return self._watch.gone(peer)
            self._watch.heard(peer)
            if "done" in head:
                self._watch.finished(peer, head["done"], head["digest"])
            elif "at" in head:
                self._watch.started(peer, *head["at"])
            elif "problem" in head:
                self._watch.told(peer, head["problem"])
            elif self.rank:
                self._messages.put((head, arrays))
        self._watch.leaves(peer)
        self._staying.discard(peer)
        if self.rank == 0 and not self._staying:
            self._closed.set()

    def _beat(self) -> None:
        """A thread: tells the peers that this rank lives, and which call it has started last."""
        while not self._closed.wait(BEAT):
            self._tell_reachable({"at": self._watch.position()})

    def _tell_reachable(self, head: dict[str, Any]) -> None:
        for peer in list(self._staying):
            with suppress(OSError):  # the thread that listens to the peer finds out
                self._channels[peer].send(head)
