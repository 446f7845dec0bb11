"""A submitted request, as its user sees it."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator

from specjax.engine.ticket import Ticket
from specjax.generation.completion import result_of
from specjax.generation.result import Event, Result


class Handle:
    """An iterator over the events of one request. ``Engine.submit`` makes it.

    Several threads may wait for one handle. Each event is given to one of them only, or to the request's listener.
    """

    def __init__(
        self, ticket: Ticket, abort: Callable[[Ticket], None], listener: Callable[[Event], None] | None = None
    ):
        self._ticket, self._abort, self._listener = ticket, abort, listener
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # guards the list of callbacks
        self._callbacks: list[Callable[[Handle], None]] = []

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        """The next token. Blocks until the token is there.

        Raises:
          StopIteration: the request has ended. ``result()`` says how.
          EngineClosedError: the engine ended before the request.
        """
        event = self._events.get()
        if event is not None:
            return event
        self._events.put(None)  # for the next call
        if self._error is not None:
            raise self._error
        raise StopIteration

    def result(self, timeout: float | None = None) -> Result:
        """The result, with one prompt. Blocks until the request has ended. The events may be read or left unread.

        Of an aborted request the result holds the tokens so far, and the finish reason is "abort".

        Args:
          timeout: the longest time to wait, in seconds; None: without a limit.

        Raises:
          TimeoutError: the request has not ended by then.
          NoDistributionError: no token of the request had a finite logit.
          EngineClosedError: the engine ended before the request.
          Exception: what the request's listener raised.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the request has not ended within {timeout} seconds; it goes on")
        if self._error is not None:
            raise self._error
        return result_of(self._ticket.job, [self._ticket.completion], self._ticket.seconds())

    def abort(self) -> None:
        """Ends the request. Its slot and pages are free within two rounds. An ended request stays as it is."""
        self._abort(self._ticket)

    def when_done(self, call: Callable[["Handle"], None]) -> None:
        """Calls ``call(handle)`` once the request has ended: in the engine's thread, or at once if it has ended.

        What ``call`` raises in the engine's thread is logged and has no other effect.
        """
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(call)
                return
        call(self)

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._ended.is_set()

    @property
    def prompt_tokens(self) -> list[int]:
        """The token ids of the prompt."""
        return self._ticket.prompt

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens whose cache entries were found in the prefix cache."""
        return self._ticket.cached_tokens

    def tell(self, event: Event) -> None:
        """Called by the engine's thread: one more token. A listener that raises ends its own request, and no other."""
        try:
            (self._listener or self._events.put)(event)
        except Exception as error:
            self._error, self._listener = error, _ignore
            self._abort(self._ticket)

    def end(self, error: BaseException | None = None) -> None:
        """Called by the engine's thread: the request has ended."""
        self._error = self._error or error
        with self._lock:
            self._ended.set()
        self._events.put(None)
        for call in self._callbacks:
            try:
                call(self)
            except Exception:
                logging.getLogger(__name__).exception("a function given to Handle.when_done has failed")


def _ignore(event: Event) -> None:
    """Stands in for a listener that has raised."""
