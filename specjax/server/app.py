"""The HTTP application: which path does what."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from starlette.responses import Response

import specjax
from specjax.server import chat, completions, metrics, page
from specjax.server.answer import Answer
from specjax.server.chat import Chat
from specjax.server.completions import Completions
from specjax.server.errors import RefusedError, add_handlers
from specjax.server.gate import Gate
from specjax.server.parameters import ChatRequest, CompletionRequest, DetokenizeRequest, Sampling, TokenizeRequest
from specjax.server.reports import Kept
from specjax.server.respond import json_response, respond
from specjax.server.service import Service
from specjax.server.shape import Shape


class ErrorBody(BaseModel):
    """The form of every error."""

    error: dict[str, Any]


async def _service(request: Request) -> Service:  # FastAPI would run a plain function in another thread
    return request.app.state.service


Served = Annotated[Service, Depends(_service)]


def create(service: Service) -> FastAPI:
    """The application around a service. Its lifespan loads the engine, and closes it at the end."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.open():
            yield

    app = FastAPI(title="specjax", version=specjax.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(_generating)
    app.include_router(_others)
    app.add_middleware(Gate, service=service)
    add_handlers(app)
    _describe_errors(app)
    return app


_errors: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 429, 500, 503)
}
_event = {"type": "object", "properties": {"data": {"type": "string"}}}
_streams = {**_errors, 200: {"content": {"text/event-stream": {"schema": _event}}}}
_generating, _others = APIRouter(prefix="/v1"), APIRouter()


@_generating.post("/completions", responses=_streams)
async def complete(request: Request, body: CompletionRequest, service: Served) -> Any:
    """Continues one or several texts."""
    return await _generate(request, body, service, completions.work, Completions)


@_generating.post("/chat/completions", responses=_streams)
async def complete_chat(request: Request, body: ChatRequest, service: Served) -> Any:
    """Writes the next message of a conversation."""
    return await _generate(request, body, service, chat.work, Chat)


async def _generate(request: Request, body: Sampling, service: Service, work_of: Callable, form: type[Shape]) -> Any:
    """Answers a request. ``work_of`` makes its work, and ``form`` says how the answer looks."""
    name, engine = service.model(body.model)

    def begin() -> tuple[Answer, Shape]:
        work = work_of(engine, body, request.state.salt)
        shape, answer = form(body, work, name, service.token_text), Answer(service, engine, name, work)
        if shape.with_origins and work.choices == 1:
            service.reports.keep(shape.answer_id, Kept(name, engine, work, answer.results))
        return answer, shape

    return await respond(request, service, begin, bool(body.stream))


@_generating.get("/models", responses=_errors)
async def models(service: Served) -> Any:
    """The names of the model."""
    return json_response({"object": "list", "data": [_model(service, name) for name in service.names]})


@_generating.get("/models/{name:path}", responses=_errors)
async def model(name: str, service: Served) -> Any:
    """The model of a name."""
    service.check_model(name)
    return json_response(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    longest = service.engine.longest
    return {"id": name, "object": "model", "created": service.began, "owned_by": "specjax", "max_model_len": longest}


@_others.post("/tokenize", responses=_errors)
async def tokenize(body: TokenizeRequest, service: Served) -> Any:
    """The tokens of a text or of a conversation."""
    service.check_model(body.model)
    tokenizer = service.tokenizer

    def encode() -> list[int]:
        if body.messages is not None:
            return chat.encode(tokenizer, body.messages, body.add_generation_prompt)
        return tokenizer.encode(body.prompt)

    ids = await run_in_threadpool(_refusing, encode)
    names = [tokenizer.token_str(token) for token in ids]
    longest = service.engine.longest
    return json_response({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": names})


@_others.post("/detokenize", responses=_errors)
async def detokenize(body: DetokenizeRequest, service: Served) -> Any:
    """The text of tokens."""
    service.check_model(body.model)
    size = service.engine.lm.vocab_size
    if outside := [token for token in body.tokens if not 0 <= token < size]:
        raise RefusedError(400, f"tokens must be ids from 0 to {size - 1}, got {outside[0]}", "tokens")
    return json_response({"prompt": await run_in_threadpool(service.tokenizer.decode, body.tokens)})


@_others.get("/health", responses=_errors)
async def health(service: Served) -> Any:
    """Whether the server is loading, ready, draining or broken. Only a ready server answers with status 200."""
    answer = json_response({"status": service.stage})
    answer.status_code = 200 if service.stage == "ready" else 503
    return answer


@_others.get("/metrics", responses={**_errors, 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
async def metrics_text(service: Served) -> Any:
    """Counts and times, in Prometheus's text format."""
    return Response(await run_in_threadpool(metrics.text_of, service), media_type="text/plain; version=0.0.4")


@_others.get("/version")
async def version() -> Any:
    """The version of specjax."""
    return json_response({"version": specjax.__version__})


@_others.get("/", include_in_schema=False)
def page_for_people() -> Any:
    """The page for people."""
    return page.response()


@_others.get("/report/{answer_id}", include_in_schema=False)
async def report(answer_id: str, service: Served) -> Any:
    """The report of one of the last answers, a page for people."""
    found = await run_in_threadpool(service.reports.page, answer_id)
    if found is None:
        raise RefusedError(404, "there is no report of this answer: the server keeps those of the last whole answers")
    return page.report(found)


def _refusing(call: Any) -> Any:
    """The result of a call whose errors are the client's."""
    try:
        return call()
    except ValueError as error:
        raise RefusedError(400, str(error)) from error


def _describe_errors(app: FastAPI) -> None:
    """Takes FastAPI's own form of validation errors out of the description: here they have status 400."""
    describe = app.openapi

    def described() -> dict[str, Any]:
        document = describe()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document

    app.openapi = described  # type: ignore[method-assign]
