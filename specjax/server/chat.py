"""POST /v1/chat/completions: the next message of a conversation."""

from typing import Any

from specjax.engine.engine import Engine
from specjax.server import shape
from specjax.server.answer import Piece, Token
from specjax.server.errors import RefusedError
from specjax.server.parameters import ChatRequest, Message
from specjax.server.work import Work, work_of


def encode(
    tokenizer: Any, messages: list[Message], add_generation_prompt: bool | None, kwargs: Any = None
) -> list[int]:
    """The token ids of a conversation.

    Raises:
      ValueError: the model has no chat template, or the template refuses the messages.
    """
    return tokenizer.apply_chat_template(
        [message.plain() for message in messages],
        add_generation_prompt=add_generation_prompt is not False,
        chat_template_kwargs=kwargs,
    )


def work(engine: Engine, body: ChatRequest, key_salt: str) -> Work:
    """The checked request. This encodes the conversation, so it may take a while.

    Raises:
      RefusedError, ValueError: the request can't be met.
    """
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if limit == 0:
        raise RefusedError(400, "max_tokens must be at least 1 in a chat", "max_tokens")
    ids = encode(engine.lm.tokenizer, body.messages, body.add_generation_prompt, body.chat_template_kwargs)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return work_of(engine, body, [ids], limit, logprobs, key_salt)


class Chat(shape.Shape):
    """The form of a chat completion."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        """One chunk for each choice, which says whose turn it is."""
        delta = {"role": "assistant", "content": ""}
        found = [
            self.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(self.work.choices)
        ]
        if self.with_ids:
            found[0]["prompt_token_ids"] = self.work.prompts[0]
        return found

    def response(self, pieces: Any, usage: dict[str, Any]) -> dict[str, Any]:
        """As its base; with the prompt's ids, if the client asked."""
        ids = {"prompt_token_ids": self.work.prompts[0]} if self.with_ids else {}
        return {**super().response(pieces, usage), **ids}

    def _delta(self, piece: Piece, text: str) -> dict[str, Any]:
        return {**self._common(piece), "delta": {"content": text}, "finish_reason": None}

    def _end(self, piece: Piece) -> dict[str, Any]:
        return {"index": piece.index, "delta": {}, "logprobs": None, "finish_reason": piece.finish_reason}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {**self._common(piece), "message": message, "finish_reason": piece.finish_reason}

    def _common(self, piece: Piece) -> dict[str, Any]:
        """The fields of a choice with and without a stream."""
        ids = {"token_ids": self._new_ids(piece)} if self.with_ids else {}
        logprobs = None
        if self.work.logprobs is not None:
            logprobs = {"content": [self._logprob(token) for token in piece.tokens], "refusal": None}
        return {"index": piece.index, "logprobs": logprobs, **ids}

    def _logprob(self, token: Token) -> dict[str, Any]:
        """The log-probability of one token, and the likeliest tokens there."""
        top = [self._named(other, value) for other, value in shape.likeliest(token)]
        return {**self._named(token.token, shape.finite(token.logprob)), "top_logprobs": top}

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        found = self.tokens.bytes_of(token)
        return {"token": self.tokens.name_of(token), "logprob": logprob, "bytes": list(found)}
