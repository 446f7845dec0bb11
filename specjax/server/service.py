"""The engine behind the server, and the stages of its life: loading, ready, draining, broken."""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from specjax.engine.engine import Engine
from specjax.engine.scoring import score
from specjax.engine.stats import Stats
from specjax.models.model import check_no_encoder
from specjax.report import progress
from specjax.server import process
from specjax.server.bridge import Bridge
from specjax.server.errors import RefusedError
from specjax.server.metrics import Times
from specjax.server.reports import Reports
from specjax.server.token_text import TokenText

if TYPE_CHECKING:
    from specjax.server.answer import Answer


class Service:
    """What all requests share.

    Args:
      make: makes the engine, in a thread of its own. It may take minutes: the server says "loading" meanwhile.
      names: the names by which clients ask for the model. The first one stands in all answers.
      keys: the keys that let clients in. Empty: everybody is let in.
      others: makes further engines from the first one, with other drafters. Each is a model of its own: the first name,
        a colon, and the key.
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        names: Sequence[str],
        keys: Sequence[str] = (),
        others: Mapping[str, Callable[[Engine], Engine]] | None = None,
    ):
        self._others = {f"{names[0]}:{name}": make_other for name, make_other in (others or {}).items()}
        self.names, self.times = [*names, *self._others], Times([names[0], *self._others])
        self.bridge: Bridge
        self.token_text: TokenText
        self.before: dict[str, Stats] = {}  # what each engine had done before the first request
        self.draining = False
        self.failure: BaseException | None = None  # why the engine could not be made
        self.began = int(time.time())
        self.running = 0  # requests that are being answered
        self.answers: set[Answer] = set()
        self.reports = Reports()
        self._make = make
        self.engines: dict[str, Engine] = {}  # by the name that stands in answers; the first one is the main one
        self._loaded = False
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]

    @property
    def stage(self) -> str:
        """ "loading", "ready", "draining" or "broken"."""
        if self.failure is not None or any(engine.error is not None for engine in self.engines.values()):
            return "broken"
        if self.draining:
            return "draining"
        return "ready" if self._loaded else "loading"

    @property
    def engine(self) -> Engine:
        """The engine. Raises RefusedError while the server has none."""
        if not self._loaded:
            raise RefusedError(503, "the server is still loading its model", code="loading")
        return self.engines[self.names[0]]

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises RefusedError while the server has no model."""
        return self.engine.lm.tokenizer

    @property
    def keys(self) -> list[bytes]:
        """The SHA-256 digests of the keys that let clients in."""
        return self._keys

    def check_open(self) -> None:
        """Raises RefusedError unless new requests are let in."""
        if self.draining:
            raise RefusedError(503, "the server is shutting down", code="shutting_down")
        if self.stage == "broken":
            raise RefusedError(500, "the engine does not run any more; restart the server", code="engine_broken")
        assert self.engine

    def check_model(self, name: str | None) -> None:
        """Raises RefusedError if a client asks for another model than the server has."""
        if name is not None and name not in self.names:
            known = ", ".join(map(repr, self.names))
            raise RefusedError(404, f"there is no model {name!r} here; there is {known}", "model", "model_not_found")

    def model(self, name: str | None) -> tuple[str, Engine]:
        """The model that a client asks for: its name in answers, and its engine. Raises as :meth:`check_model`."""
        self.check_model(name)
        assert self.engine
        own = name if name in self._others else self.names[0]
        return own, self.engines[own]

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Loads the engine in the background, and closes it at the end.

        Meanwhile the process has the settings of :mod:`specjax.server.process`.
        """
        self.bridge = Bridge(asyncio.get_running_loop())
        with process.settings():
            loading = asyncio.create_task(self._load())
            try:
                yield
            finally:
                await loading
                for engine in self.engines.values():
                    await asyncio.to_thread(engine.close, drain=False)

    async def _load(self) -> None:
        try:
            engine = await asyncio.to_thread(self._made, self.names[0], self._make)
            for name, make_other in self._others.items():
                await asyncio.to_thread(self._made, name, partial(make_other, engine))
        except (Exception, SystemExit) as error:
            self.failure = error
        else:
            assert engine.lm.tokenizer is not None
            self.before = {name: await asyncio.to_thread(one.stats) for name, one in self.engines.items()}
            await asyncio.to_thread(process.collect_for_the_last_time)
            self.token_text, self._loaded = TokenText(engine.lm.tokenizer), True

    def _made(self, name: str, make: Callable[[], Engine]) -> Engine:
        """An engine, compiled. Called by a thread of its own."""
        engine = make()
        if engine.lm.tokenizer is None:
            engine.close(drain=False)
            raise ValueError("a server needs a model with a tokenizer, and this model has none")
        if engine.lm.has_encoder:
            engine.close(drain=False)
        check_no_encoder(engine.lm, "the server")
        self.engines[name] = engine
        with progress.waiting("compiling, or fetching compiled programs"):
            engine.warmup()
            score(engine, [0, 0], 0)
        return engine

    async def drain(self, timeout: float) -> None:
        """Lets no new request in, and waits for those that run; after ``timeout`` seconds they are cut off."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.running:
                    await asyncio.sleep(0.02)
        why = RefusedError(503, "the server is shutting down, and the answer took too long", code="shutting_down")
        for answer in list(self.answers):
            answer.abort(why)
