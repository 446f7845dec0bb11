"""Any number of requests through an engine, a window of them at a time: what ``Engine.generate`` does."""

import queue
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from specjax.engine.errors import EngineClosedError, QueueFullError
from specjax.engine.handle import Handle
from specjax.generation.result import Result

if TYPE_CHECKING:
    from specjax.engine.engine import Engine

# After so many seconds a request that found the queue full is submitted again, unless a request of ours ends before.
RETRY = 0.05


def results(engine: "Engine", requests: Iterable[Any]) -> Iterator[tuple[int, Result | Exception]]:
    """The results as :meth:`Engine.generate` documents them."""
    done: queue.SimpleQueue[Handle] = queue.SimpleQueue()
    window, source = min(2 * engine.limits.slots, engine.max_waiting), enumerate(requests)
    pending: dict[Handle, int] = {}  # the requests in the engine, and their indices
    kept: tuple[int, Any] | None = None  # a request that found the queue full
    closed: EngineClosedError | None = None  # somebody has closed the engine; the requests in it may end
    try:
        while True:
            while len(pending) < window and (given := kept or next(source, None)) is not None:
                index, kept = given[0], None
                try:
                    handle = engine.submit(**_checked(given[1]))
                except QueueFullError:
                    kept = given
                    break
                except EngineClosedError as error:
                    if engine.error is not None:
                        raise
                    closed, source = error, enumerate(())
                except Exception as error:
                    yield index, error
                else:
                    pending[handle] = index
                    handle.when_done(done.put)
            if not (pending or kept):
                if closed is not None:
                    raise closed
                return
            try:
                handle = done.get(timeout=RETRY if kept else None)
            except queue.Empty:
                continue
            yield pending.pop(handle), _outcome(handle)
    finally:
        for handle in pending:
            handle.abort()


def _checked(request: Any) -> dict[str, Any]:
    """The arguments of ``Engine.submit``. Raises ValueError if they are no mapping with a prompt.

    An exception in the place of a request says why the request could not be made, and is raised.
    """
    if isinstance(request, Exception):
        raise request
    if not isinstance(request, Mapping) or "prompt" not in request:
        raise ValueError(
            f'a request must be a dict of the arguments of Engine.submit, with the key "prompt", got {request!r}'
        )
    return dict(request)


def _outcome(handle: Handle) -> Result | Exception:
    """The result of a request that has ended, or its own error. Raises EngineClosedError if the engine has ended."""
    try:
        return handle.result()
    except EngineClosedError:
        raise
    except Exception as error:
        return error
