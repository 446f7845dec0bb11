"""One turn of the engine: admit, read a part of a prompt, run a round, and learn of the round before.

Only one thread uses a loop. The host learns of each round one round late: while the device runs round r + 1, the host
reads the results of round r. A row that has ended in round r is therefore still part of round r + 1, and idle there.
Each round remembers which request had which slot, so a late result is never given to the slot's next request.
"""

import dataclasses
import time
from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.decode.decoder import Decoder
from specjax.decode.likeliest import Top
from specjax.engine import programs, saved, sizes, swap
from specjax.engine.checks import Checks
from specjax.engine.pace import Pace
from specjax.engine.parts import Part, parts_of, with_slots
from specjax.engine.programs import Limits, Packed
from specjax.engine.queue import Waiting
from specjax.engine.saved import Saved
from specjax.engine.shortened import by_length
from specjax.engine.stats import Stats
from specjax.engine.ticket import Ticket
from specjax.generation.completion import RowRound
from specjax.models.cache import PAGE


class Flight(NamedTuple):
    """A round that was started, and of which the host has not learned yet."""

    # The request in each slot when the round was started.
    tickets: list[Ticket | None]
    # The results, on their way to the host.
    packed: Packed
    # The number of tokens that the round drafted at most.
    kind: int
    # Whether the device had something else to do before the round, or nothing, so that its time says little.
    held_up: bool


class Loop:
    """The requests, the pages and the device's state.

    Args:
      decoder: the target, drafter, verifier and K.
      limits: the sizes of the engine's arrays.
      chunk: the number of prompt tokens that one call reads. An encoder reads a whole source in one call.
      headroom: the number of cache entries that a round needs past the tokens of a request.
      overcommit: whether requests get pages as they grow, in place of all pages at once.
      paced: whether rounds draft fewer tokens, or none, while that is faster.
      calls: runs the programs over several processes; None: this process runs them.
    """

    def __init__(
        self, decoder: Decoder, limits: Limits, chunk: int, headroom: int, overcommit: bool, paced: bool = False,
        calls: Any = None,
    ):
        self.decoder, self.limits = decoder, limits
        self.decoders = by_length(decoder) if paced else {decoder.num_speculative_tokens: decoder}
        self.pace = Pace(self.decoders)
        self.headroom, self.overcommit = headroom, overcommit
        self.programs = calls or programs.programs_of(decoder, limits)
        self.state: Any = self.programs.empty(decoder, limits)
        self.width = max(cache.capacity // PAGE for cache in programs.caches(self.state))  # of the widest table
        self.whole = decoder.target.has_encoder  # whether prompts are read whole
        self.chunk = limits.tokens if self.whole else chunk
        self.reads = sizes.reads(self.whole, self.chunk, self.width)
        self.parts = parts_of(limits, decoder.target.mesh)
        self.tickets: set[Ticket] = set()  # the requests that have not ended
        self.waiting: Waiting[Ticket] = Waiting()
        self.running: list[Ticket | None] = [None] * limits.slots
        self.staged: Ticket | None = None  # the request whose prompt is being read
        self.staged_row: Any = None
        self.in_flight: deque[Flight] = deque()
        self.held_up = True  # whether the device did something else since the last round was started
        self.learned = 0.0  # when the host learned of the last round
        self.counts = Stats(accepted_per_position=[0] * decoder.num_speculative_tokens)
        self.checks = Checks.wanted()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.staged or self.in_flight or any(self.running))

    def missing(self, ticket: Ticket) -> int:
        """The number of pages that a request lacks: for its next round if overcommitted, else until its end."""
        length = ticket.limit
        if self.overcommit:  # each round in flight adds K + 1 tokens at most
            length = min(length, ticket.length + len(self.in_flight) * (self.decoder.num_speculative_tokens + 1))
        return max(0, -(-(length + self.headroom) // PAGE) - len(ticket.pages))

    def turn(self) -> None:
        """One turn. It reads prompts, dispatches a round if a request runs, and learns of the round before."""
        self._read_prompts()
        if self.overcommit:
            swap.make_room(self)
        dispatched = any(map(self._goes_on, self.running))
        if dispatched:
            if self.checks:  # the round that follows must not change the pages that were just published
                self.checks.compare(self)
            self._dispatch()
        while len(self.in_flight) > (1 if dispatched else 0):
            self._learn(self.in_flight.popleft())
        if self.checks:
            self.checks.check(self)

    def learn_all(self) -> None:
        """Learns of all rounds in flight."""
        while self.in_flight:
            self._learn(self.in_flight.popleft())

    def compile_others(self, ticket: Ticket) -> None:
        """Runs what a first request may not need: shorter rounds, and the program that reads a chunk, at every width.

        Args:
          ticket: any request. Its row owns no pages here.
        """
        for full in (False, True):
            for decoder in self.decoders.values():
                if decoder is not self.decoder:
                    self.state, _ = self.programs.round(decoder, self.state, full)
        zero = _numbers(0)
        for width, count in self.reads:
            row = self.programs.stage(self.decoder, ticket.row._replace(table=np.zeros((1, self.width), np.int32)))
            self.state, row = self.programs.feed(self.decoder, self.state, row, zero, zero, count, width)
        self.state = saved.compiled(self.programs, self.state, swaps=self.overcommit)
        if self.overcommit:
            self.state = self.programs.give_tables(self.state, np.zeros((self.limits.slots, self.width), np.int32))
        self.programs.resumed(row, ticket.row.key, np.zeros((1, self.width), np.int32))

    def add(self, ticket: Ticket) -> None:
        """A request joins the queue. If it asks for no new token, it ends at once."""
        self.tickets.add(ticket)
        if ticket.limit > len(ticket.prompt):
            ticket.place = self.waiting.add(ticket, ticket.priority)
        else:
            ticket.completion.finish_reason = "length"
            self._end(ticket)

    def abort(self, ticket: Ticket) -> None:
        """Ends a request before its time."""
        if not ticket.completion.running:
            return
        ticket.completion.finish_reason = "abort"
        if ticket is self.staged:
            self.staged = self.staged_row = None
        elif ticket.slot is not None:
            self.release([ticket])
        else:
            self.waiting.remove(ticket)
            ticket.samples.leave(ticket)
        self._end(ticket)

    def fail(self, error: BaseException) -> None:
        """Ends every request by an error. The error may have come while a request was on its way to another place."""
        for ticket in self.tickets:
            ticket.handle.end(error)

    def free(self) -> None:
        """Frees the device's arrays."""
        self.state = self.staged_row = None
        self.in_flight.clear()

    def stats(self) -> Stats:
        """A copy of the counts, with the present state."""
        return dataclasses.replace(
            self.counts,
            running=sum(ticket is not None for ticket in self.running),
            waiting=len(self.waiting) + (self.staged is not None),
            free_kv_tokens=sum(part.pages.available for part in self.parts) * PAGE,
            kv_tokens=sum(part.pages.count for part in self.parts) * PAGE,
            accepted_per_position=list(self.counts.accepted_per_position),
            finished=dict(self.counts.finished),
        )

    def _goes_on(self, ticket: Ticket | None) -> bool:
        """Whether a slot's request may need one more round. Each round in flight gives it one token at least."""
        if ticket is None:
            return False
        coming = sum(ticket in flight.tickets for flight in self.in_flight)
        return ticket.length + coming < ticket.limit

    def _read_prompts(self) -> None:
        """Reads prompts, and gives requests whose prompt is read a slot.

        While requests run, a long prompt gets one chunk between two rounds. Prompts of one chunk are read until no more
        requests wait than run: a burst of short requests soon fills the slots.
        """
        while self.staged or self._admit():
            finished = self._read_chunk()
            if any(self.running) and not (finished and sum(map(bool, self.running)) < len(self.waiting)):
                return

    def _admit(self) -> bool:
        """Stages the request whose turn it is, if there are a slot and pages for it. -> whether there were."""
        if not self.waiting:
            return False
        ticket = self.waiting.first()
        return any(self._admit_to(part, ticket) for part in with_slots(self.parts, self.running, ticket))

    def _admit_to(self, part: Part, ticket: Ticket) -> bool:
        """Stages a request in a part of the mesh, if there are pages for it. -> whether there were."""
        known, resume = part.pages.known(ticket.keys), ticket.saved or ticket.samples.read
        if resume is not None and len(known) < resume.first:
            resume = None  # a page of the prompt was given away meanwhile, so the prompt is read again
        # Chunks begin at multiples of their size: the same call computes an entry, whatever was known before it.
        in_whole_chunks = len(known) * PAGE // self.chunk * self.chunk // PAGE
        known = known[: resume.first if resume else in_whole_chunks]
        part.pages.share(known)
        ticket.part, ticket.pages = part, known
        # Overcommitted, each running request keeps a page to grow into, so that nobody is swapped out at once.
        spare = len(part.present(self.running)) if self.overcommit else 0
        if self.missing(ticket) + spare > part.pages.available:  # nobody overtakes the first in the queue
            part.pages.give_back(known)
            ticket.pages = []
            return False
        self.waiting.pop()
        ticket.pages = known + part.pages.take(self.missing(ticket))
        ticket.read = ticket.to_read if resume else len(known) * PAGE
        self._stage(ticket, resume)
        ticket.saved = None
        ticket.samples.leave(ticket)
        if "admitted" not in ticket.times:
            ticket.cached_tokens = ticket.read
            self.counts.prompt_tokens += len(ticket.prompt)
            self.counts.cached_tokens += ticket.cached_tokens
        ticket.mark("admitted")
        return True

    def _stage(self, ticket: Ticket, resume: Saved | None) -> None:
        """Makes the row of a request that has its pages: an empty row, or a saved one with its saved entries."""
        table = np.zeros((1, self.width), np.int32)
        table[0, : len(ticket.pages)] = ticket.pages
        self.staged = ticket
        if resume is None:
            self.staged_row = self.programs.stage(self.decoder, ticket.row._replace(table=table))
            return
        self.held_up = True
        self.state = saved.restored(self.programs, self.state, resume, ticket.pages[resume.first :])
        self.staged_row = self.programs.resumed(resume.row, ticket.row.key, table)

    def _read_chunk(self) -> bool:
        """Reads one chunk of the staged request's prompt. If the prompt is then read, the request gets a slot.

        Returns:
          Whether the prompt is read.
        """
        ticket = self.staged
        assert ticket is not None
        if ticket.read < ticket.to_read:
            self._feed(ticket)
            ticket.read = min(ticket.read + self.chunk, ticket.to_read)
        if ticket.read < ticket.to_read:
            return False
        ticket.part.pages.publish(ticket.pages[: len(ticket.keys)], ticket.keys)
        if ticket.samples.waiting and ticket.to_read and not ticket.samples.read:
            length = len(ticket.prompt)
            ticket.samples.read = saved.prompt_of(self.programs, self.state, self.staged_row, ticket.pages, length)
        ticket.slot = next(slot for slot in ticket.part.slots if self.running[slot] is None)
        self.state = self.programs.join(self.state, self.staged_row, _numbers(ticket.slot))
        self.running[ticket.slot] = ticket
        self.staged = self.staged_row = None
        ticket.mark("running")
        return True

    def _feed(self, ticket: Ticket) -> None:
        """Reads the chunk of the staged request's prompt that begins after what is read, or the whole prompt."""
        self.held_up = True
        end = ticket.to_read if self.whole else ticket.read + self.chunk
        width, count = next(read for read in self.reads if end <= read[0] * PAGE)
        self.state, self.staged_row = self.programs.feed(
            self.decoder, self.state, self.staged_row, _numbers(ticket.read), _numbers(ticket.part.number), count, width
        )

    def _dispatch(self) -> None:
        """Starts one round. The results are copied to the host as soon as they are there."""
        full = any(ticket is not None and ticket.full for ticket in self.running)
        kind = self.pace.next_kind()
        self.state, packed = self.programs.round(self.decoders[kind], self.state, full)
        for leaf in jax.tree.leaves(packed):
            leaf.copy_to_host_async()
        self.in_flight.append(Flight(list(self.running), packed, kind, self.held_up or not self.in_flight))
        self.held_up = False
        self.counts.rounds += 1

    def _learn(self, flight: "Flight") -> None:
        """Gives the results of a round to the requests that had the slots then and have them still."""
        packed, began = jax.device_get(flight.packed), self.learned
        self.learned = time.perf_counter()
        if not flight.held_up:
            took_part = packed.numbers[packed.numbers[:, 0] > 0, 0]
            if len(took_part):
                self.pace.learn(flight.kind, self.learned - began, float(took_part.mean()))
        ended = []
        for slot, ticket in enumerate(flight.tickets):
            if ticket is None or self.running[slot] is not ticket:
                continue
            self._advance(ticket, _of_row(packed, slot, ticket.job.decoder.top_logprobs))
            if not ticket.completion.running:
                ended.append(ticket)
        if ended:
            self.release(ended)
        for ticket in ended:
            self._end(ticket)

    def _advance(self, ticket: Ticket, seen: RowRound) -> None:
        """Tells a request's handle the tokens of one round."""
        before = len(ticket.completion.tokens)
        for event in ticket.completion.advance(seen):
            ticket.mark("first token")
            ticket.handle.tell(event)
        new = len(ticket.completion.tokens) - before
        if seen.committed:
            self.counts.count_step(new, seen.drafted, min(seen.accepted, new))

    def release(self, tickets: list[Ticket]) -> None:
        """Frees the slots of some requests. Programs dispatched from now on don't write to their pages."""
        slots = np.zeros(self.limits.slots, bool)
        for ticket in tickets:
            assert ticket.slot is not None
            slots[ticket.slot], self.running[ticket.slot] = True, None
        self.state = self.programs.release(self.state, slots)  # type: ignore[arg-type]

    def _end(self, ticket: Ticket) -> None:
        """Gives a request's pages back, and tells its handle that the request has ended."""
        if ticket.pages:
            ticket.part.pages.give_back(ticket.pages)
        ticket.pages, ticket.saved = [], None
        ticket.mark("ended")
        self.counts.count_end(ticket)
        self.tickets.remove(ticket)
        ticket.handle.end()


def _numbers(*values: int) -> Any:
    """i32[N] on the host."""
    return np.array(values, np.int32)


def _of_row(packed: Any, slot: int, top_logprobs: int) -> RowRound:
    """The round of one slot, from NumPy arrays."""
    committed, accepted, drafted, active, failed = packed.numbers[slot, :5].tolist()
    chosen = None if packed.logprobs is None else packed.logprobs[slot]
    wanted = packed.top is not None and top_logprobs
    top = Top(*(x[slot, :, :top_logprobs] for x in packed.top)) if wanted else None
    return RowRound(committed, accepted, drafted, bool(active), bool(failed), packed.numbers[slot, 5:], chosen, top)
