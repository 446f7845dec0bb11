"""Replicas on a Ray cluster: the server by Ray Serve, and many rows by Ray Data. The extra ``ray`` installs Ray.

Each replica makes an engine of its own by a function ``make``, which Ray carries to the replica: for example
``lambda: specjax.Engine(specjax.load("smollm2-135m-instruct"), slots=8)``.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import ray
from ray import serve

from specjax.engine.engine import Engine
from specjax.offline import rows as offline
from specjax.offline.rows import Row, row_of
from specjax.server.app import create
from specjax.server.service import Service

BATCH = 8  # rows that an engine gets together; Ray runs four batches of a block at once, so slots are seldom empty
BLOCK = 64  # rows that go to a replica together, and again to another one if the replica is lost


class Server:
    """One replica of the server of :mod:`specjax.server`. Its engine is compiled before requests come."""

    def __init__(self, make: Callable[[], Engine], names: Sequence[str], keys: Sequence[str]):
        engine = make()
        engine.warmup()
        self._service = Service(lambda: engine, names, keys)

    def __serve_build_asgi_app__(self) -> Any:
        app = create(self._service)

        async def loaded(scope: Any, receive: Any, send: Any) -> None:
            while scope["type"] == "http" and self._service.stage == "loading":  # a moment: the engine is there
                await asyncio.sleep(0.05)
            await app(scope, receive, send)

        return loaded

    def check_health(self) -> None:
        """Ray Serve replaces a replica for which this raises."""
        if self._service.stage == "broken":
            raise RuntimeError("the engine does not run any more")


def application(
    make: Callable[[], Engine], names: Sequence[str], keys: Sequence[str] = (), **options: Any
) -> serve.Application:
    """The server as an application for ``ray.serve.run``.

    Args:
      make: makes the engine of a replica.
      names: the names by which clients ask for the model.
      keys: the keys that let clients in. Empty: everybody is let in.
      **options: options of ``ray.serve.deployment``: ``num_replicas``, ``ray_actor_options={"num_gpus": 1}``,
        ``autoscaling_config={"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 16}`` and others.
        ``max_ongoing_requests`` should be above the engine's slots; without the option it is 256.
    """
    options = {"max_ongoing_requests": 256, **options}
    return serve.deployment(**options)(serve.ingress()(Server)).bind(make, names, keys)


class Answers:
    """A class for ``Dataset.map_batches``. It takes the columns "place" and "row", and gives the column "answer".

    "row" is the JSON text of a row as :func:`specjax.offline.rows.row_of` takes it, "place" is the row's number from 0,
    and "answer" is the JSON text of an output row. A bad row becomes a row with an error.
    """

    def __init__(self, make: Callable[[], Engine], defaults: dict[str, Any] | None = None, seed: int | None = 0):
        self._engine, self._defaults, self._seed = make(), defaults or {}, seed
        self._engine.warmup()

    async def __call__(self, batch: dict[str, np.ndarray]) -> AsyncIterator[dict[str, list[str]]]:
        """Answers a batch. Several batches are answered at once."""
        pairs = zip(batch["place"], batch["row"], strict=True)
        rows = [row_of(int(place), json.loads(str(text)), self._defaults, self._seed) for place, text in pairs]
        answers = await asyncio.to_thread(lambda: list(offline.answers(self._engine, rows)))
        yield {"answer": [json.dumps(answer) for answer in answers]}


def answers(make: Callable[[], Engine], rows: Iterable[Row], replicas: int, **options: Any) -> Iterator[dict[str, Any]]:
    """As :func:`specjax.offline.rows.answers`, over replicas. Ray gives the rows of a lost replica to another one.

    Args:
      make: makes the engine of a replica.
      rows: the rows. All of them are held by this process.
      replicas: the number of replicas.
      **options: options of ``Dataset.map_batches``, for example ``num_gpus=1``.

    Yields:
      The output rows, in any order. Rows that can't be used come first, as errors.
    """
    items = []
    for row in rows:
        if isinstance(row.request, Exception):
            yield {"id": row.id, "error": str(row.request)}
        else:
            items.append({"place": row.place, "row": json.dumps({**row.request, "id": row.id})})
    if not items:
        return
    blocks = max(min(2 * replicas, len(items)), -(-len(items) // BLOCK))
    dataset = ray.data.from_items(items, override_num_blocks=blocks)
    pool = ray.data.ActorPoolStrategy(size=replicas)
    found = dataset.map_batches(Answers, fn_constructor_args=[make], compute=pool, batch_size=BATCH, **options)
    for item in found.iter_rows():
        yield json.loads(item["answer"])
