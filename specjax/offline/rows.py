"""Rows of a data set go in, and rows with answers come out as requests end. A bad row becomes a row with an error."""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from specjax.decode.numeric import is_int
from specjax.engine.engine import Engine
from specjax.engine.errors import EngineClosedError
from specjax.generation.options import Options
from specjax.generation.result import Result

# What a row may hold beside its id and its prompt: the arguments of ``Engine.submit``.
FIELDS = frozenset({field.name for field in dataclasses.fields(Options)} | {"priority", "cache_salt"})


class Row(NamedTuple):
    """One row of the input."""

    # The row's place in the input, from 0. A row without a seed of its own has the base seed + place.
    place: int
    # The row's name in the output: the row's own "id", or its place.
    id: str | int
    # The arguments of ``Engine.submit``, or why the row can't be used.
    request: dict[str, Any] | Exception


def row_of(place: int, given: Any, defaults: dict[str, Any], seed: int | None) -> Row:
    """A row as the user gave it, as a request.

    Args:
      place: the row's place in the input, from 0.
      given: a dict with "prompt" (text or token ids) or "messages" (a conversation). It may have an "id", and the
        fields of :class:`specjax.Options` that hold for this row alone.
      defaults: fields of :class:`specjax.Options` for rows that don't have these fields. ``chat`` is for texts alone.
      seed: the base seed; None: each row without a seed draws a fresh one.
    """
    if not isinstance(given, dict):
        return Row(place, place, ValueError(f"a row must be an object with a prompt, got {given!r}"))
    name = given.get("id", place)
    if not (isinstance(name, str) or is_int(name)):
        return Row(place, place, ValueError(f"id must be a string or an integer, got {name!r}"))
    return Row(place, name, _request(given, {**defaults, "seed": None if seed is None else seed + place}))


def _request(given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any] | ValueError:
    """The arguments of ``Engine.submit``, or why they can't be made."""
    prompts = [given[name] for name in ("prompt", "messages") if name in given]
    if len(prompts) != 1:
        return ValueError('a row needs either "prompt" or "messages"' + (", and not both" if prompts else ""))
    options = {name: value for name, value in given.items() if name not in ("id", "prompt", "messages")}
    unknown = sorted(options.keys() - FIELDS)
    if unknown:
        return ValueError(f"{', '.join(map(repr, unknown))} is no field of a row; rows have the fields of "
                          "specjax.Options, priority and cache_salt")  # fmt: skip
    if isinstance(bias := options.get("logit_bias"), dict):  # JSON writes the token ids as strings
        options["logit_bias"] = {int(key) if str(key).isdecimal() else key: value for key, value in bias.items()}
    if "prompt" in given and not isinstance(given["prompt"], str):
        defaults = {name: value for name, value in defaults.items() if name != "chat"}  # ``chat`` wraps texts alone
    return {**defaults, **options, "prompt": prompts[0]}


def answers(engine: Engine, rows: Iterable[Row], keep_order: bool = False) -> Iterator[dict[str, Any]]:
    """The output rows, as the requests end.

    Only a window of requests is in the engine at any time, so the rows may be without end. If another thread closes the
    engine, the iterator ends after the rows that are finished; rows that were aborted are left out.

    Args:
      engine: the engine. Its requests may be mixed with those of others.
      rows: the rows, from :func:`row_of`.
      keep_order: whether answers come in the order of the rows, and not as the requests end.

    Raises:
      EngineClosedError: the engine has ended by an error.
    """
    asked: deque[Row] = deque()  # the rows that have no answer yet, in order

    def noted() -> Iterator[Row]:
        for row in rows:
            if keep_order:
                asked.append(row)
            yield row

    early: dict[int, dict[str, Any]] = {}
    for row, outcome in _outcomes(engine, noted()):
        if isinstance(outcome, Result) and outcome.finish_reasons[0] == "abort":
            continue
        answer = _answer(row, outcome)
        if not keep_order:
            yield answer
            continue
        early[row.place] = answer
        while asked and asked[0].place in early:
            yield early.pop(asked.popleft().place)


def _outcomes(engine: Engine, rows: Iterator[Row]) -> Iterator[tuple[Row, Result | Exception]]:
    """The rows as their requests end, each with its result or its own error."""
    pending: dict[int, Row] = {}

    def requests() -> Iterator[Any]:
        for index, row in enumerate(rows):
            pending[index] = row
            yield row.request

    try:
        for index, outcome in engine.generate(requests()):
            yield pending.pop(index), outcome
    except EngineClosedError:
        if engine.error is not None:
            raise


def _answer(row: Row, outcome: Result | Exception) -> dict[str, Any]:
    """The output row."""
    if isinstance(outcome, Exception):
        return {"id": row.id, "error": str(outcome) or repr(outcome)}
    metrics = outcome.metrics[0]
    answer: dict[str, Any] = {
        "id": row.id,
        "text": None if outcome.texts is None else outcome.texts[0],
        "tokens": outcome.tokens[0],
        "finish_reason": outcome.finish_reasons[0],
        "prompt_tokens": len(outcome.prompt_tokens[0]),
        "seed": outcome.seeds[0],
        "rounds": metrics.num_steps,
        "drafted": metrics.num_draft_tokens,
        "accepted": metrics.num_accepted_tokens,
    }
    if outcome.logprobs is not None:
        answer["logprobs"] = outcome.logprobs[0]
    if outcome.top_logprobs is not None:
        answer["top_logprobs"] = outcome.top_logprobs[0]
    return answer
