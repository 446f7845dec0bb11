"""The engine: requests come and go, and each decodes exactly as if alone."""

import atexit
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from specjax import drafters
from specjax.decode import numeric
from specjax.decode.decoder import Decoder
from specjax.engine import sizes
from specjax.engine.commands import Commands
from specjax.engine.errors import EngineClosedError, QueueFullError
from specjax.engine.handle import Handle
from specjax.engine.loop import Loop
from specjax.engine.programs import Limits
from specjax.engine.stats import Stats
from specjax.engine.ticket import Ticket, job_for
from specjax.engine.tickets import tickets_of
from specjax.engine.window import results
from specjax.generation.options import Options
from specjax.generation.result import Event, Result
from specjax.models import cache as kv
from specjax.models import tuning
from specjax.models.cache import PAGE
from specjax.models.lm import LM

Value = TypeVar("Value")


class Engine:
    """Decodes many requests at once, speculatively, on one device or mesh. A thread of the engine owns the device.

    A request's tokens depend on the model, the drafter, the verifier, K, the request's sampling parameters and its seed
    alone: not on the slot, the other requests, the time of arrival, hits in the prefix cache, or aborts. This holds
    because every program has one fixed shape, all draws are addressed by seed and position, and requests share nothing
    but pages that are never written again.

    Use it as a context manager, or call :meth:`close`: an engine that nobody closes lives until the process ends.

    Args:
      lm: the target model.
      drafter: "auto" for :func:`specjax.drafters.auto`; else as in :class:`specjax.Options`, for all requests.
      verifier, num_speculative_tokens, lossy: as in :class:`specjax.Options`, for all requests.
      slots: B, the requests that decode at the same time. The parts of a mesh with an axis "data" share them evenly.
      capacity: the most tokens of a request, prompt included. It is cut to the model's context.
      kv_tokens: the tokens that the caches of all requests hold together. None: enough for every slot at capacity. The
        parts of a mesh share them evenly, and a request has all its tokens in one part.
      exact: True: every target call has one shape. False: a round in which all drafts are short makes a narrower call,
        and rounds draft half of K or nothing while that is faster. The law of the output is the same, but a request's
        tokens then depend on the other requests and on the clock.
      block_width: as in :class:`specjax.Options`. None: the drafter's widest block if ``exact``.
      prefix_cache: whether requests share the cache pages of common prefixes. Those of an encoder's sources share none,
        because every entry depends on the whole source.
      prefill_chunk: the prompt tokens that one call reads, a multiple of 64. None: 128, on a CPU 64. A hit in the
        prefix cache is a multiple of this number. An encoder reads each source in one call, so it must be None.
      overcommit: True: a request gets cache pages as it grows, so that more requests fit into ``kv_tokens``. When the
        pages run out, the youngest request is swapped out to the host's memory, and goes on later with the same tokens.
        False: a request that has a slot has all its pages, and is never held up.
      max_waiting: how many requests may wait for a slot.
      max_logprobs: the most likeliest tokens that a request may ask for at each position.
      max_listed: the most entries of a request's ``logit_bias`` or ``allowed_token_ids``.
      calls: ``Replica.calls()`` of :mod:`specjax.distributed` runs the engine's programs over several processes. None:
        this process runs them.

    Raises:
      ValueError: an argument can't be used. Nothing has run on the device by then.
    """

    def __init__(
        self,
        lm: LM,
        drafter: Any = "auto",
        verifier: Any = "rejection",
        num_speculative_tokens: int = 5,
        slots: int = 8,
        capacity: int = 4096,
        kv_tokens: int | None = None,
        exact: bool = True,
        block_width: int | None = None,
        prefix_cache: bool = True,
        prefill_chunk: int | None = None,
        overcommit: bool = False,
        max_waiting: int = 1024,
        max_logprobs: int = 20,
        max_listed: int = 512,
        lossy: bool = False,
        calls: Any = None,
    ):
        if not isinstance(lm, LM):
            raise ValueError(f"lm must be a model, as specjax.load gives it, got {lm!r}")
        numeric.check_counts(1, slots=slots, capacity=capacity, max_waiting=max_waiting)
        numeric.check_counts(0, max_logprobs=max_logprobs, max_listed=max_listed)
        numeric.check_switches(exact=exact, overcommit=overcommit, prefix_cache=prefix_cache)
        sizes.check_chunk(prefill_chunk)
        if overcommit and calls is not None:
            raise ValueError("overcommit=True needs the memory of one host: an engine over processes can't have it")
        drafter = drafters.auto(lm) if drafter == "auto" else drafter
        if lm.has_encoder and prefill_chunk is not None:
            raise ValueError(f"prefill_chunk must be None, as an encoder reads sources whole, got {prefill_chunk!r}")
        self.lm, self.max_waiting, self.prefix_cache = lm, max_waiting, prefix_cache and not lm.has_encoder
        self.max_logprobs = min(max_logprobs, lm.vocab_size)
        self.fixed = dict(
            drafter=drafter, verifier=verifier, num_speculative_tokens=num_speculative_tokens, lossy=lossy,
            block_width=block_width,
        )  # fmt: skip
        self.decoder = self._decoder(exact)
        self.capacity = min(capacity, lm.max_positions)
        chunk = tuning.engine_chunk(prefill_chunk)
        tokens = kv.room(-(-(self.capacity + self.decoder.headroom + chunk) // PAGE) * PAGE)
        headroom = self.decoder.headroom + sizes.further_room(self.decoder)
        own, parts = -(-(self.capacity + headroom) // PAGE), sizes.parts(lm, slots)
        wanted = own * slots if kv_tokens is None else -(-numeric.check_count("kv_tokens", kv_tokens) // PAGE)
        pages = -(-wanted // parts)  # of each part of the mesh, which has a null page too
        self.kv_tokens = pages * parts * PAGE  # that fit into all pages
        # The most tokens of one request.
        self.longest = sizes.longest(lm, self.capacity, self.kv_tokens, headroom, parts)
        self.limits = Limits(slots, tokens, parts * (pages + 1), stops=32, lists=sizes.listed(lm, max_listed))
        self._loop = Loop(self.decoder, self.limits, chunk, headroom, overcommit, paced=not exact, calls=calls)
        self.programs = self._loop.programs
        self._commands, self._closing = Commands(), False
        self._lock = threading.RLock()  # guards the two fields below; what a callback submits takes it once more
        self._open, self._entered = True, 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="specjax engine", daemon=True)
        self._thread.start()
        atexit.register(self.close, drain=False)  # a process must not end while a thread uses the device

    def _decoder(self, exact: bool) -> Decoder:
        """The decoder of all rounds. Raises ValueError if its drafter can't be exact and must be."""
        decoder = job_for(self.lm, [0], Options(**self.fixed, allow_unknown_ids=True)).decoder
        if exact and decoder.plan.shared_shapes:
            raise ValueError(
                f"{type(decoder.drafter).__name__} drafts in calls whose shape depends on all requests, so a request's "
                "last bits would depend on the others; pass exact=False, or another drafter"
            )
        width = decoder.plan.block if decoder.block_width is None and exact else decoder.block_width
        return dataclasses.replace(decoder, top_logprobs=self.max_logprobs, block_width=width)

    def submit(
        self,
        prompt: Any,
        *,
        priority: int = 0,
        cache_salt: str = "",
        listener: Callable[[Event], None] | None = None,
        **options: Any,
    ) -> Handle:
        """Adds a request. Returns at once.

        Args:
          prompt: a string, a conversation (a list of messages), or a list of token ids.
          priority: lower numbers go first; a request of one level more waits as if it had come 64 requests later.
          cache_salt: requests with different salts share no pages of the prefix cache.
          listener: gets each event in place of the handle's iterator. The engine's thread calls it and waits for it, so
            it must return at once. If it raises, the request ends, and ``result()`` raises the same error.
          **options: fields of :class:`specjax.Options`, except those that the engine fixes for all requests. If
            ``max_new_tokens`` is None, a request may run up to the engine's capacity. The default of 128 is cut to the
            capacity too.

        Raises:
          ValueError: an option or the prompt can't be used, or the request could never fit into the engine. Nothing has
            run on the device by then.
          QueueFullError: ``max_waiting`` requests wait already.
          EngineClosedError: the engine is closed.
        """
        _check_listener(listener)
        listeners = [] if listener is None else [listener]
        return self._submit(tickets_of(self, prompt, 1, priority, cache_salt, options), listeners)[0]

    def submit_many(
        self,
        prompt: Any,
        n: int,
        *,
        priority: int = 0,
        cache_salt: str = "",
        listener: Callable[[int, Event], None] | None = None,
        **options: Any,
    ) -> list[Handle]:
        """Adds one request for ``n`` samples. The prompt is read once, and the samples share its pages.

        Sample i has the tokens of a request of its own with seed + i, and may be aborted alone.

        Args:
          prompt, priority, cache_salt: as in :meth:`submit`.
          n: the number of samples, at most ``max_waiting``.
          listener: as in :meth:`submit`, but a function of the sample's index and the event.
          **options: as in :meth:`submit`. ``seed`` is that of the first sample.

        Returns:
          The handle of each sample.

        Raises:
          QueueFullError: not all samples may wait. None of them was kept.
          ValueError, EngineClosedError: as in :meth:`submit`.
        """
        _check_listener(listener)
        tickets = tickets_of(self, prompt, n, priority, cache_salt, options)
        return self._submit(tickets, [] if listener is None else [partial(listener, i) for i in range(n)])

    def generate(self, requests: Iterable[Any]) -> Iterator[tuple[int, Result | Exception]]:
        """Runs any number of requests, and yields results as the requests end.

        Only a window of requests is in the engine at any time, so the iterable may be endless. If other threads have
        filled the queue, the call waits.

        Args:
          requests: the arguments of :meth:`submit` as dicts, with the key "prompt".

        Yields:
          The request's index in the iterable, and its result. In place of the result of a request that is refused, or
          that fails, stands the error that :meth:`submit` or :meth:`Handle.result` raised. The other requests go on.

        Raises:
          EngineClosedError: the engine was closed before the last request was taken; the results of those that it had
            taken come first. Or the engine has ended by an error.
        """
        return results(self, requests)

    def stats(self) -> Stats:
        """Counts so far, and what the engine holds now."""
        return self._commands.ask(self._loop.stats, self._thread)

    def between_rounds(self, call: Callable[[], Value]) -> Future[Value]:
        """Has the engine's thread make a call between two rounds: other work on the device that the engine owns.

        All requests wait while the call runs, so it should only dispatch, and leave reading the results to the caller.

        Args:
          call: takes nothing. What it returns or raises goes into the future.

        Raises:
          EngineClosedError: the engine is closed.
        """
        with self._lock:
            self._check_open()
            return self._commands.post(call)

    @property
    def error(self) -> BaseException | None:
        """The error that ended the engine's thread; None: there was none."""
        return self._error

    def warmup(self) -> None:
        """Compiles all programs and runs each once. After this, no request compiles anything."""
        fixed: dict[str, Any] = dict(max_new_tokens=1, ignore_eos=True, allow_unknown_ids=True)
        for logprobs in (False, True):
            self.submit([0, 0], logprobs=logprobs, **fixed).result()
        (ticket,) = tickets_of(self, [0, 0], 1, 0, "", fixed)
        self._commands.ask(partial(self._loop.compile_others, ticket), self._thread)

    def close(self, drain: bool = True) -> None:
        """Ends the engine: its thread ends, and its caches are freed.

        Args:
          drain: whether requests that were submitted before run to their end. False: they are aborted, also if another
            call waits for their end.
        """
        with self._lock:
            was_open, self._open = self._open, False
        if not drain:
            self._commands.put(self._abort_all)
        if was_open:
            self._commands.put(self._no_more)
        if threading.current_thread() is not self._thread:  # a listener may close the engine
            self._thread.join()
            atexit.unregister(self.close)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close(drain=error is None)

    def _submit(self, tickets: list[Ticket], listeners: Sequence[Callable[[Event], None]]) -> list[Handle]:
        """The handles of tickets that join the queue together, each with its own listener if there are any."""
        for ticket, listener in itertools.zip_longest(tickets, listeners):
            ticket.handle = Handle(ticket, self._abort, listener)
        with self._lock:
            self._check_open()
            waiting = self._entered + len(self._loop.waiting)
            if waiting + len(tickets) > self.max_waiting:
                raise QueueFullError(f"{waiting} requests wait, and max_waiting is {self.max_waiting}; try again later")
            self._entered += len(tickets)
            for ticket in tickets:
                self._commands.put(partial(self._enter, ticket))
        return [ticket.handle for ticket in tickets]

    def _check_open(self) -> None:
        if not self._open or self._error is not None:
            raise EngineClosedError("the engine is closed; make a new one") from self._error

    def _enter(self, ticket: Ticket) -> None:
        """Called by the engine's thread: the request joins the queue."""
        with self._lock:
            self._entered -= 1
            self._loop.add(ticket)

    def _abort(self, ticket: Ticket) -> None:
        self._commands.put(lambda: self._loop.abort(ticket))

    def _abort_all(self) -> None:
        """Called by the engine's thread: aborts every request."""
        while self._loop.waiting:
            self._loop.abort(self._loop.waiting.first())
        for ticket in [self._loop.staged, *self._loop.running]:
            if ticket is not None:
                self._loop.abort(ticket)

    def _no_more(self) -> None:
        """Called by the engine's thread: no request comes after this."""
        self._closing = True

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while not (self._closing and self._loop.idle):
                self._commands.obey(wait=self._loop.idle and not self._closing)
                self._loop.turn()
        except BaseException as error:  # whoever waits for a request learns of the error
            with self._lock:
                self._error = error
            broken = EngineClosedError(f"the engine has ended by an error: {error!r}")
            broken.__cause__ = error
            self._commands.obey_broken()  # requests that were submitted and have not joined the queue
            self._loop.fail(broken)
        self._loop.free()


def _check_listener(listener: Any) -> None:
    """Raises ValueError unless a listener is None or can be called."""
    if not (listener is None or callable(listener)):
        raise ValueError(f"listener must be a function, or None, got {listener!r}")
