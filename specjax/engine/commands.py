"""What other threads ask of the engine's thread."""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Value = TypeVar("Value")


class Commands:
    """A queue of calls. Any thread puts calls in, and the engine's thread makes them in the same order."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    def __len__(self) -> int:
        """How many calls have come and are not made yet."""
        return self._calls.qsize()

    def put(self, call: Callable[[], object]) -> None:
        """One more call. Nobody waits for it."""
        self._calls.put(call)

    def obey(self, wait: bool) -> None:
        """Called by the engine's thread: makes the calls that have come. If ``wait``, waits for one first."""
        while wait or not self._calls.empty():
            call, wait = self._calls.get(), False
            call()

    def obey_broken(self) -> None:
        """Makes the calls that have come, after an error of the engine. Each of them may fail."""
        while not self._calls.empty():
            with contextlib.suppress(Exception):
                self._calls.get()()

    def post(self, call: Callable[[], Value]) -> Future[Value]:
        """One more call, whose result or error goes into a future."""
        answer: Future[Value] = Future()

        def answering() -> None:
            with contextlib.suppress(Exception):
                _make(call, answer)

        self.put(answering)
        return answer

    def ask(self, call: Callable[[], Any], thread: threading.Thread) -> Any:
        """What ``call`` returns or raises when ``thread`` makes it. If that thread has ended, the caller makes it.

        An error is raised in ``thread`` too, and ends the engine.
        """
        answer: Future[Any] = Future()
        if threading.current_thread() is thread:  # a listener asks; the thread must not wait for itself
            return call()
        self.put(lambda: _make(call, answer))
        while thread.is_alive():
            with contextlib.suppress(TimeoutError):
                return answer.result(timeout=0.1)
        return answer.result() if answer.done() else call()


def _make(call: Callable[[], Value], answer: Future[Value]) -> None:
    """Makes a call. Its result or its error goes into ``answer``, and the error is raised too."""
    try:
        answer.set_result(call())
    except BaseException as error:
        answer.set_exception(error)
        raise
