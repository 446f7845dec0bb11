"""How an answer looks to clients: what completions and chat completions have in common."""

import secrets
import time
from collections.abc import Iterable
from typing import Any

from specjax.generation.result import Result
from specjax.server.answer import Piece, Token, record, speculative_decoding
from specjax.server.parameters import Sampling
from specjax.server.token_text import TokenText
from specjax.server.work import Work

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this number


class Shape:
    """Writes pieces as chunks of a stream, or as one response. Its subclasses say how a choice looks.

    Args:
      body: the request.
      work: the checked request.
      model: the name of the model in the answer.
      tokens: the names of tokens.
    """

    prefix: str  # of the answer's id
    kind: str  # the answer's "object"
    chunk_kind: str  # the "object" of a chunk

    def __init__(self, body: Sampling, work: Work, model: str, tokens: TokenText):
        self.work, self.tokens = work, tokens
        self.with_ids, self.with_origins = bool(body.return_token_ids), bool(body.return_origins)
        self.with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._results: list[Result] = []  # of the choices that have ended
        self.answer_id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._heading = {"id": self.answer_id, "created": int(time.time()), "model": model}

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before the first token."""
        return []

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of one piece. The last chunk of a choice is apart: it brings the finish reason and no text."""
        found = []
        text, ids = piece.text, [token.token for token in piece.tokens if piece.segments or piece.tokens]
        if text or (ids and (self.with_ids or self.work.logprobs is not None)):
            extra: dict[str, Any] = {}
            if self.with_origins:
                extra = {"specjax": {"pieces": [{"text": text, "origin": kind} for text, kind in piece.segments]}}
            found.append(self.chunk([self._delta(piece, text)], **extra))
        if piece.result is not None:
            self._results.append(piece.result)
            last = record([piece.result], self.work.seed + piece.index)
            found.append(self.chunk([self._end(piece)], specjax=last))
        return found

    def last(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks after the last choice has ended."""
        return [{**self.chunk([]), "usage": usage, **self._metrics(self._results)}] if self.with_usage else []

    def chunk(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        """One chunk."""
        usage = {"usage": None} if self.with_usage else {}
        return {**self._heading, "object": self.chunk_kind, "choices": choices, **usage, **extra}

    def response(self, pieces: Iterable[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """The response without a stream, from one piece for each choice that holds all of the choice."""
        pieces = list(pieces)
        results = [piece.result for piece in pieces if piece.result is not None]
        return {
            **self._heading,
            "object": self.kind,
            "choices": [self._choice(piece) for piece in pieces],
            "usage": usage,
            "specjax": {**record(results, self.work.seed), **self._pieces(pieces)},
            **self._metrics(results),
        }

    def _metrics(self, results: list[Result]) -> dict[str, Any]:
        """The record under the name that vLLM gives it, which has a place for one choice only."""
        found = speculative_decoding(results[0]) if len(results) == 1 else None
        return {"metrics": {"speculative_decoding": found}} if found else {}

    def _pieces(self, pieces: list[Piece]) -> dict[str, Any]:
        """The origins of the text of each choice, if the client asked."""
        if not self.with_origins:
            return {}
        return {"pieces": [[{"text": text, "origin": kind} for text, kind in piece.segments] for piece in pieces]}

    def _new_ids(self, piece: Piece) -> list[int]:
        """The ids of a piece's tokens, without the prompt's."""
        prompt = len(self.work.prompts[piece.index // self.work.n])
        echoed = bool(piece.segments and piece.segments[0][1] == "prompt" and self.work.logprobs is not None)
        return [token.token for token in piece.tokens][prompt if echoed else 0 :]

    def _delta(self, piece: Piece, text: str) -> dict[str, Any]:
        """The choice in a chunk that brings text."""
        raise NotImplementedError

    def _end(self, piece: Piece) -> dict[str, Any]:
        """The choice in the chunk that ends it."""
        raise NotImplementedError

    def _choice(self, piece: Piece) -> dict[str, Any]:
        """The choice in a response without a stream."""
        raise NotImplementedError


def finite(logprob: float | None) -> float | None:
    """A log-probability as JSON can hold it."""
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


def likeliest(token: Token) -> list[tuple[int, float]]:
    """The likeliest tokens at a token's position."""
    return [(other, max(value, LEAST_LOGPROB)) for other, value in token.top or []]
