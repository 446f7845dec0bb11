"""The choices of one request while the engine works on them: text and tokens as they come, then the record."""

import dataclasses
import math
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from specjax.engine.engine import Engine
from specjax.engine.handle import Handle
from specjax.engine.scoring import score
from specjax.generation.metrics import Totals
from specjax.generation.result import Event, Result
from specjax.server.bridge import Mailbox
from specjax.server.errors import RefusedError, as_refusal
from specjax.server.held_text import HeldText, Segments
from specjax.server.service import Service
from specjax.server.work import Work
from specjax.text.text_stream import TextStream


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of a choice."""

    # The token's id.
    token: int
    # The number of characters of the choice's text before the token.
    offset: int
    # The token's natural log-probability. None: log-probabilities were not asked for, or this is a text's first token.
    logprob: float | None
    # The likeliest tokens at the token's position, as (id, log-probability) pairs. None: as for ``logprob``.
    top: list[tuple[int, float]] | None


@dataclasses.dataclass
class Piece:
    """What one choice has new."""

    # The choice.
    index: int
    # The new text, in parts that each come from one token, with the token's origin.
    segments: Segments = dataclasses.field(default_factory=list)
    # The new tokens. A token may come with a later piece than the piece in which its text begins.
    tokens: list[Token] = dataclasses.field(default_factory=list)
    # The result, if the choice has ended.
    result: Result | None = None

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(text for text, _ in self.segments)

    @property
    def finish_reason(self) -> str | None:
        """Why the choice has ended: "stop" or "length". None: it has not."""
        return None if self.result is None else self.result.finish_reasons[0]


class _Choice:
    """One choice: what it has that no piece has brought yet."""

    def __init__(self, index: int, handle: Handle, stops: tuple[str, ...], opening: Piece):
        self.handle = handle
        self.held = HeldText(stops)
        self.piece = Piece(index, list(opening.segments), list(opening.tokens))
        self.offset = len(self.piece.text)  # characters so far
        self.ended = False
        self.last_time: float | None = None

    def add(self, event: Event, name: str) -> None:
        """Adds one token. ``name`` is the token's own text, unless the token is a part of a character."""
        own = name if event.text.endswith(name) else event.text  # text of earlier tokens may have been held back
        place = self.offset + len(event.text) - len(own)
        self.piece.tokens.append(Token(event.token, place, event.logprob, event.top_logprobs))
        self.offset += len(event.text)
        self.piece.segments += self.held.push(event.text, event.origin, event.finish_reason)

    def take(self) -> Piece:
        """What is new since the last call."""
        piece, self.piece = self.piece, Piece(self.piece.index)
        return piece


class Answer:
    """A request in the engine. :meth:`start` makes it; use it in one event loop."""

    def __init__(self, service: Service, engine: Engine, model: str, work: Work):
        self.work, self._service, self._engine, self._mailbox = work, service, engine, Mailbox()
        times = service.times  # a histogram is looked up once for the answer, and not for each token
        self._first_token, self._between_tokens = times.first_token.labels(model), times.between_tokens.labels(model)
        self._model = model
        self._choices: list[_Choice] = []
        self.results: list[Result | None] = [None] * work.choices
        self._cut_off: RefusedError | None = None
        self._began = time.perf_counter()

    def start(self) -> None:
        """Gives all choices to the engine. This may read the prompts' log-probabilities first, so it may block.

        Raises:
          RefusedError: the engine refuses the request. Some choices may be in the engine: call :meth:`abort`.
        """
        try:
            openings = [self._opening(row) for row in range(len(self.work.prompts))]
            for row, prompt in enumerate(self.work.prompts):
                if self._cut_off:
                    raise self._cut_off
                first = len(self._choices)
                handles = self._engine.submit_many(
                    prompt, self.work.n, listener=partial(self._tell, first), cache_salt=self.work.salt,
                    seed=self.work.seed + first, **self.work.options,
                )  # fmt: skip
                for index, handle in enumerate(handles, first):
                    self._choices.append(_Choice(index, handle, self.work.stops, openings[row]))
                    handle.when_done(partial(self._done, index))
            if self._cut_off:  # while the last prompt was on its way
                raise self._cut_off
        except Exception as error:
            raise as_refusal(error) from error

    def abort(self, why: RefusedError | None = None) -> None:
        """Ends the request in the engine. ``why`` is what the client is told, if it still listens."""
        self._cut_off = self._cut_off or why
        for choice in self._choices:
            choice.handle.abort()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What is new, as often as there is something new: at most one piece of each choice at a time.

        A piece without text is held back, unless it is a choice's last.

        Raises:
          RefusedError: the engine can't go on with the request.
        """
        left = len(self._choices)
        opened = [choice.take() for choice in self._choices if choice.piece.segments]
        if opened:
            yield opened
        while left:
            touched: dict[int, _Choice] = {}
            for index, event, moment in await self._mailbox.take():
                touched[index] = choice = self._choices[index]
                if event is not None:
                    self._observe(choice, moment)
                    choice.add(event, self._service.token_text.name_of(event.token))
                else:
                    choice.ended = True
                    choice.piece.result = self.results[index] = self._result(choice)
            pieces = [choice.take() for choice in touched.values() if choice.piece.segments or choice.ended]
            left -= sum(piece.result is not None for piece in pieces)
            if pieces:
                yield pieces

    def usage(self) -> dict[str, Any]:
        """The counts of tokens, in the form of OpenAI's interface. A prompt counts once for all its choices."""
        firsts = self._choices[:: self.work.n]
        done = [result for result in self.results if result is not None]
        prompt, new = sum(map(len, self.work.prompts)), sum(len(result.tokens[0]) for result in done)
        accepted = sum(result.metrics[0].num_accepted_tokens for result in done)
        drafted = sum(result.metrics[0].num_draft_tokens for result in done)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(choice.handle.cached_tokens for choice in firsts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted,
            },
        }  # fmt: skip

    def _tell(self, first: int, sample: int, event: Event) -> None:
        """Called by the engine's thread: one more token of a sample of the prompt whose first choice is ``first``."""
        self._service.bridge.put(self._mailbox, (first + sample, event, time.perf_counter()))

    def _done(self, index: int, handle: Handle) -> None:
        """Called by the engine's thread: a choice has ended."""
        self._service.bridge.put(self._mailbox, (index, None, time.perf_counter()))

    def _observe(self, choice: _Choice, moment: float) -> None:
        """Measures the time of a token."""
        if choice.last_time is None:
            self._first_token.observe(moment - self._began)
        else:
            self._between_tokens.observe(moment - choice.last_time)
        choice.last_time = moment

    def _result(self, choice: _Choice) -> Result:
        """The result of a choice that has ended. Raises RefusedError if it did not end by itself."""
        try:
            result = choice.handle.result()
        except Exception as error:
            raise as_refusal(error) from error
        if result.finish_reasons[0] == "abort":
            raise self._cut_off or RefusedError(503, "the server is shutting down", code="shutting_down")
        self._service.times.whole.labels(self._model).observe(time.perf_counter() - self._began)
        self._service.times.queue.labels(self._model).observe(result.seconds["queue"])
        return result

    def _opening(self, row: int) -> Piece:
        """The prompt as the first piece of each of its choices if the client wants it back, else an empty piece."""
        if self.work.echo is None:
            return Piece(0)
        prompt, text = self.work.prompts[row], self.work.echo[row]
        if self.work.logprobs is None:
            return Piece(0, [(text, "prompt")])
        known = score(self._engine, prompt, self.work.logprobs)
        if any(math.isnan(logprob) for logprob, _ in known):
            message = "the model gives no finite logits after a token of the prompt"
            raise RefusedError(500, message, code="no_distribution")
        scored: list[tuple[Any, Any]] = [(None, None), *known]
        offsets = _offsets(self._service.tokenizer, prompt, text)
        tokens = [Token(*entry, *best) for entry, best in zip(zip(prompt, offsets, strict=True), scored, strict=True)]
        return Piece(0, [(text, "prompt")], tokens)


def _offsets(tokenizer: Any, prompt: list[int], text: str) -> list[int]:
    """The place in the prompt's text at which each token begins."""
    stream, found, place = TextStream(tokenizer), [], 0
    for token in prompt:
        found.append(min(place, len(text)))
        piece = stream.push(token)
        name = tokenizer.token_str(token)
        if not piece and not tokenizer.prints(token) and text.startswith(name, place):
            piece = name  # a special token that the client wrote out
        place += len(piece)
    return found


def speculative_decoding(result: Result) -> dict[str, Any] | None:
    """What speculation did for one choice, under vLLM's names, which AIPerf reads. None: nothing was drafted."""
    metrics = result.metrics[0]
    if not metrics.num_spec_steps:
        return None
    plain = metrics.num_steps - metrics.num_spec_steps  # steps of no draft, which accept 0 tokens
    none, *others = metrics.acceptance_histogram
    return {
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "draft_acceptance_rate": metrics.draft_acceptance_rate,
        "acceptance_histogram": [none - plain, *others],
        "num_accepted_draft_tokens": metrics.num_accepted_tokens,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_spec_steps": metrics.num_spec_steps,
        "num_spec_tokens": metrics.num_speculative_tokens,
    }


def record(results: list[Result], seed: int) -> dict[str, Any]:
    """What speculation did: the field ``specjax`` of responses and last chunks."""
    totals = Totals.of([result.metrics[0] for result in results])
    return {
        "rounds": totals.steps,
        "drafted": totals.drafted,
        "accepted": totals.accepted,
        "mean_acceptance_length": totals.mean_acceptance_length,
        "seed": seed,
    }
