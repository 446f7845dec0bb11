"""POST /v1/completions: continues texts."""

from typing import Any

from specjax.engine.engine import Engine
from specjax.server import shape
from specjax.server.answer import Piece, Token
from specjax.server.errors import RefusedError
from specjax.server.parameters import CompletionRequest
from specjax.server.work import Work, check_length, work_of

MAX_TOKENS = 16  # new tokens if the client gives no limit, as in OpenAI's interface


def work(engine: Engine, body: CompletionRequest, key_salt: str) -> Work:
    """The checked request. This encodes the prompts, so it may take a while.

    Raises:
      RefusedError, ValueError: the request can't be met.
    """
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    prompts: list[Any] = [given] if isinstance(given[0], int) else given
    tokenizer, vocab = engine.lm.tokenizer, engine.lm.vocab_size
    assert tokenizer is not None
    ids = []
    for prompt in prompts:
        if isinstance(prompt, str) and not prompt:
            raise RefusedError(400, "a prompt must hold at least one character or token", "prompt")
        ids.append(tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt))
        if any(token >= vocab for token in ids[-1]):
            raise RefusedError(400, f"a prompt has a token id outside the vocabulary of {vocab}", "prompt")
    limit = MAX_TOKENS if body.max_tokens is None else body.max_tokens
    echo = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts] if body.echo else None
    if body.max_tokens is None:  # the default is cut to what fits
        for one in ids:
            check_length(engine, "prompt", len(one), None)
        limit = min(limit, engine.longest - max(map(len, ids)))
    return work_of(engine, body, ids, limit, body.logprobs, key_salt, echo)


class Completions(shape.Shape):
    """The form of a completion."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _delta(self, piece: Piece, text: str) -> dict[str, Any]:
        ids = {"token_ids": self._new_ids(piece)} if self.with_ids else {}
        logprobs = self._logprobs(piece.tokens)
        return {"index": piece.index, "text": text, "logprobs": logprobs, "finish_reason": None, **ids}

    def _end(self, piece: Piece) -> dict[str, Any]:
        return {"index": piece.index, "text": "", "logprobs": None, "finish_reason": piece.finish_reason}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        ids: dict[str, Any] = {}
        if self.with_ids:
            prompt = self.work.prompts[piece.index // self.work.n]
            ids = {"token_ids": self._new_ids(piece), "prompt_token_ids": prompt}
        return {**self._delta(piece, piece.text), "finish_reason": piece.finish_reason, **ids}

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        """The log-probabilities of some tokens, as four lists of one length. None: they were not asked for."""
        if self.work.logprobs is None:
            return None
        name = self.tokens.name_of
        return {
            "tokens": [name(token.token) for token in tokens],
            "token_logprobs": [shape.finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, token: Token) -> dict[str, float] | None:
        """The likeliest tokens by name, and the token itself. The likelier of two tokens with one name stands."""
        if token.logprob is None:
            return None
        found: dict[str, float] = {}
        for other, value in [*shape.likeliest(token), (token.token, max(token.logprob, shape.LEAST_LOGPROB))]:
            found.setdefault(self.tokens.name_of(other), value)
        return found
