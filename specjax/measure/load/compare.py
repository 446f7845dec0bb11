"""Runs one load on several ways to the same engine, in turn, and compares their throughputs."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from specjax.engine.engine import Engine
from specjax.measure.benchmark.table import Table
from specjax.measure.load.drive import Ask, Request, drive
from specjax.measure.load.figures import figures
from specjax.measure.load.ways import Directly, ThroughTheApp
from specjax.report.progress import say


@dataclasses.dataclass(frozen=True)
class Load:
    """How many requests are sent, and when."""

    # The number of requests.
    count: int
    # The new tokens of each request.
    max_new_tokens: int
    temperature: float
    # Of the times, and of the first request.
    seed: int
    # The number of requests that run at the same time. None: there is a rate.
    streams: int | None = None
    # Requests a second, at random times.
    rate: float | None = None

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.streams} streams" if self.streams else f"{self.rate:g} requests/s"

    def requests(self, prompts: Iterable[str | list[int]]) -> list[Request]:
        """The requests, which go through the prompts again and again. Request i has the seed ``seed`` + i."""
        known = list(prompts)
        given = self.max_new_tokens, self.temperature
        return [Request(known[i % len(known)], *given, self.seed + i) for i in range(self.count)]


async def best(
    ways: dict[str, Ask], requests: list[Request], load: Load, repeats: int
) -> tuple[dict[str, dict[str, Any]], bool]:
    """For each way, the figures of its run of most tokens a second; and whether all runs gave the same texts.

    The ways take turns, so that a machine that slows down does so for all. One request comes first and is not counted.
    """
    found: dict[str, dict[str, Any]] = {}
    texts: set[tuple[str, ...]] = set()
    for ask in ways.values():
        (await ask(requests[0]))()
    for _ in range(repeats):
        for name, ask in ways.items():
            seen, seconds = await drive(requests, ask, load.streams, load.rate, load.seed)
            new = figures(seen, seconds)
            texts.add(tuple(one.text for one in seen))
            if name not in found or new["output_throughput"] > found[name]["output_throughput"]:
                found[name] = new
    return found, len(texts) == 1


async def engine_and_app(
    make: Callable[[], Engine], prompts: list[Any], load: Load, repeats: int, name: str, table: Table
) -> None:
    """The figures of an engine, directly and through the server's application in this process.

    Args:
      make: makes the engine.
      prompts: text, or token ids.
      load: the load.
      repeats: runs of each way.
      name: the name of the engine in the table.
      table: the table that the figures go to.
    """
    from specjax.server.app import create  # imported here, because no other load needs the extra "serve"
    from specjax.server.service import Service

    service = Service(make, ["load"])
    app = create(service)
    async with app.router.lifespan_context(app):
        while service.stage == "loading":
            await asyncio.sleep(0.05)
        if service.failure is not None:
            raise service.failure
        before = service.engine.stats()
        ways: dict[str, Ask] = {"engine": Directly(service.engine), "app": ThroughTheApp(app, "load")}
        found, same = await best(ways, load.requests(prompts), load, repeats)
        after = service.engine.stats()
    steps, accepted = after.spec_steps - before.spec_steps, after.accepted - before.accepted
    length = 1 + accepted / steps if steps else None
    for way, figure in found.items():
        add(table, f"{way}, {name}, {load.name}", {**figure, "mean_acceptance_length": length})
    ratio = found["app"]["output_throughput"] / found["engine"]["output_throughput"]
    table.sections.setdefault("app_over_engine", {})[f"{name}, {load.name}"] = {"ratio": ratio, "same_texts": same}
    table.save()
    say(f"-- through the app {ratio:.3f} times the engine's tokens/s; same texts: {same}")


def add(table: Table, name: str, found: dict[str, Any]) -> None:
    """Adds the figures of a run to a table."""
    failed = f"; {found['failed']} FAILED" if found["failed"] else ""
    length = found.get("mean_acceptance_length")
    table.add(
        f"{name}, a token",
        found["median_tpot_ms"] / 1e3,
        None,
        f"{found['output_throughput']:.1f} tokens/s, {found['request_throughput']:.2f} requests/s; first text "
        f"{found['median_ttft_ms']:.1f} ms (p99 {found['p99_ttft_ms']:.1f}), between texts "
        f"{found['median_itl_ms']:.1f} (p99 {found['p99_itl_ms']:.1f}), whole {found['median_e2el_ms']:.0f}"
        + (f"; mean acceptance length {length:.2f}" if length else "") + failed,
        **found,
    )  # fmt: skip
