"""Everything that a client is refused or told to have gone wrong, in the form of OpenAI's interface."""

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from specjax.engine.errors import EngineClosedError, QueueFullError
from specjax.generation.result import NoDistributionError

# What the interface calls the kinds of errors, by status.
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
RETRY_SECONDS = 1  # what a client is told to wait before it asks a busy server again


class RefusedError(Exception):
    """A request ends by an error that its client learns of.

    Args:
      status: the HTTP status.
      message: sentences for the client's user.
      param: the field of the request that is at fault.
      code: a word for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The JSON object that the client gets."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The HTTP response."""
        headers = {"Retry-After": str(RETRY_SECONDS)} if self.status in (429, 503) else {}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        # All but ASCII is escaped, because a message may quote a lone surrogate, which has no UTF-8.
        return Response(json.dumps(self.body()), self.status, headers, "application/json")


def as_refusal(error: BaseException) -> RefusedError:
    """The refusal that tells a client of any error."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, QueueFullError):
        return RefusedError(429, f"the server is busy: {error}", code="queue_full")
    if isinstance(error, NoDistributionError):
        return RefusedError(500, str(error), code="no_distribution")
    if isinstance(error, EngineClosedError):
        return RefusedError(500, f"the engine does not run any more: {error}", code="engine_broken")
    if isinstance(error, ValueError):
        return RefusedError(400, _in_words_of_clients(str(error)), _param_of(str(error)))
    return RefusedError(500, f"the server has a fault: {type(error).__name__}", code="internal_error")


# The options of the engine that clients know under other names.
_OPTIONS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "eos_token_id": "stop_token_ids"}
# How the engine's messages may begin, and the field of the request that is meant.
_RENAMED = {**_OPTIONS, "chat_template_kwargs": "messages", "a conversation": "messages", "the text": "prompt"}
_SAME = (
    "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty logit_bias stop seed logprobs "
    "prompt"
).split()


def _param_of(message: str) -> str | None:
    """The field that an error of the engine speaks of: the engine's messages begin with the option's name."""
    for name in (*_RENAMED, *_SAME):
        if message.startswith(name):
            return _RENAMED.get(name, name)
    return None


def _in_words_of_clients(message: str) -> str:
    """An error of the engine, with the names that clients give to options."""
    for ours, theirs in _OPTIONS.items():
        message = message.replace(ours, theirs)
    return message


def add_handlers(app: FastAPI) -> None:
    """Makes every error of an app a JSON object of this form."""

    async def refused(request: Request, error: Exception) -> Response:
        return as_refusal(error).response()

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _of_validation(error).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = RefusedError(error.status_code, str(error.detail)).response()
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(RefusedError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, refused)


def _of_validation(error: RequestValidationError) -> RefusedError:
    """The first fault that was found in a request's body. If a field may have several forms, what each form lacks."""
    faults = error.errors()
    first = faults[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return RefusedError(400, f"the body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    said = [str(fault["msg"]).removeprefix("Value error, ") for fault in faults if fault["loc"][:2] == first["loc"][:2]]
    if first["type"] == "value_error" and len(place) == 0:  # a rule about several fields, whose text begins with one
        return RefusedError(400, said[0], said[0].split()[0])
    if not place:
        return RefusedError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    return RefusedError(400, f"{place[0]}: {'; or: '.join(dict.fromkeys(said))}", param=place[0])
