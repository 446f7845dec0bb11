"""Conversations to text, by the Jinja template that comes with a model.

Templates come from strangers, so they run in Jinja's sandbox and see plain JSON data alone. transformers' renderer is
not used because its clock can't be set: a template that asks for the date would make a seed's text depend on the day.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


def is_conversation(value: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(value, list | tuple) and bool(value) and any(isinstance(part, Mapping) for part in value)


def render(template: str, variables: Mapping[str, Any], date: str | None = None) -> str:
    """The text of a conversation.

    Args:
      template: Jinja source.
      variables: of the template, as plain data: "messages", "tools", "bos_token" and so on.
      date: what ``strftime_now`` reads as the present, in ISO format; None: today, at midnight.

    Raises:
      ValueError: the template fails or refuses its input, or the date is none.
    """
    now = moment(datetime.date.today().isoformat() if date is None else date)
    try:
        compiled = _compiled(template)
        return compiled.render(**{**variables, "strftime_now": lambda format: now.strftime(format)})
    except Exception as e:  # whatever a template raises, it is about its input
        raise ValueError(f"the chat template can't render these messages: {e}") from e


def moment(date: Any) -> datetime.datetime:
    """The date, or date and time, of an ISO string. Raises ValueError for anything else."""
    try:
        return datetime.datetime.fromisoformat(date)
    except (TypeError, ValueError):
        raise ValueError(f"date must be a date in ISO format, such as '2024-07-26', got {date!r}") from None


def plain_messages(messages: str | Sequence[Message]) -> list[dict]:
    """The messages as plain data. Keys whose value is None are left out, as in transformers: templates print "None".

    Raises:
      ValueError: not a string nor a list of {"role": ..., "content": ...}.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not messages or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
        raise ValueError(
            f'a conversation must be a list of messages {{"role": "user", "content": "text"}}, got {messages!r:.200}'
        )
    return plain([{k: v for k, v in m.items() if v is not None} for m in messages], "a conversation")


def plain_tools(tools: Any) -> list[dict] | None:
    """Tools as JSON schemas; a Python function with type hints and a docstring is described by transformers.

    Raises:
      ValueError: not a list of functions or JSON schemas.
    """
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) or callable(t) for t in tools):
        raise ValueError(f"tools must be a list of JSON schemas or Python functions, got {tools!r:.200}")
    return plain([t if isinstance(t, Mapping) else _schema(t) for t in tools], "tools")


def _schema(function: Any) -> dict:
    from transformers.utils import get_json_schema  # slow to import

    try:
        return get_json_schema(function)
    except Exception as e:  # of its own kinds
        raise ValueError(f"tools: {function!r} can't be described by a JSON schema: {e}") from e


def plain(value: Any, what: str) -> Any:
    """A copy of JSON data, without methods that a template could call. Raises ValueError for other data."""
    try:
        return json.loads(json.dumps(value, default=dict))
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"{what} must be plain JSON data (strings, numbers, lists, dicts), got {value!r:.200}") from e


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template)


class _Generation(Extension):
    """``{% generation %}`` marks what a model says, for training; here its body is all that counts."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """As transformers has it; Jinja's own escapes HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message):
    raise jinja2.exceptions.TemplateError(message)
