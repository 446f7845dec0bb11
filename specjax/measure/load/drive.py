"""Sends requests: a fixed number at a time, or at random times."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator

import numpy as np

from specjax.measure.load.figures import Seen


@dataclasses.dataclass(frozen=True)
class Request:
    """One request. Its answer has ``max_tokens`` tokens exactly."""

    # Text, or token ids.
    prompt: str | list[int]
    max_tokens: int
    temperature: float
    seed: int


# Sends a request, and returns when its answer has ended. What came back is read by the second call, after the run, so
# that reading takes no time from the requests that run.
Ask = Callable[[Request], Awaitable[Callable[[], Seen]]]


async def drive(
    requests: list[Request], ask: Ask, streams: int | None, rate: float | None, seed: int = 0
) -> tuple[list[Seen], float]:
    """Sends all requests and waits for their ends.

    Args:
      requests: the requests, in their order.
      ask: sends one.
      streams: how many requests run at the same time. None: requests come at random times.
      rate: without ``streams``, the requests a second. The times between them are exponential, so the arrivals are a
        Poisson process.
      seed: of the times.

    Returns:
      What was seen of each request, and the seconds that all took together.
    """
    began = time.perf_counter()
    seen: list[Callable[[], Seen]]
    if streams is None:
        assert rate is not None
        gaps = np.random.default_rng(seed).exponential(1 / rate, len(requests))
        moments = began + np.cumsum(gaps) - gaps[0]  # the first one comes at once
        seen = await asyncio.gather(*map(_later, requests, moments, [ask] * len(requests)))
    else:
        left: Iterator[tuple[int, Request]] = iter(enumerate(requests))
        found: dict[int, Callable[[], Seen]] = {}
        await asyncio.gather(*(_stream(left, ask, found) for _ in range(streams)))
        seen = [found[index] for index in range(len(requests))]
    seconds = time.perf_counter() - began
    return [read() for read in seen], seconds


async def _later(request: Request, moment: float, ask: Ask) -> Callable[[], Seen]:
    await asyncio.sleep(moment - time.perf_counter())
    return await ask(request)


async def _stream(left: Iterator[tuple[int, Request]], ask: Ask, found: dict[int, Callable[[], Seen]]) -> None:
    """One of several streams, which take requests from one iterator until none are left."""
    for index, request in left:
        found[index] = await ask(request)
