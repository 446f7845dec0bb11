"""Conversations to text, by the Jinja template that comes with a model.

Templates come from strangers, so they run in Jinja's sandbox and see only plain JSON data. transformers' renderer is
not used, because its clock can't be set: if a template asks for the date, the text of a seed would depend on the day.
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
    """Whether a prompt is a conversation: a list with at least one message in it."""
    return isinstance(value, list | tuple) and any(issubclass(kind, Mapping) for kind in set(map(type, value)))


def render(template: str, variables: Mapping[str, Any], date: str | None = None) -> str:
    """The text of a conversation.

    Args:
      template: Jinja source.
      variables: the template's variables, as plain data: "messages", "tools", "bos_token" and so on.
      date: the present date, in ISO format, that the template's ``strftime_now`` reads; None: today, at midnight.

    Raises:
      ValueError: the template fails or refuses its input, or the date is not in ISO format.
    """
    now = moment(datetime.date.today().isoformat() if date is None else date)
    try:
        compiled = _compiled(template)
        return compiled.render(**{**variables, "strftime_now": lambda format: now.strftime(format)})
    except Exception as e:  # every error that a template raises is about its input
        texts = all(isinstance(message.get("content"), str) for message in variables.get("messages", ()))
        hint = "" if texts else "; the content of some messages is missing or no text: join text parts to one text"
        raise ValueError(f"the chat template can't render these messages: {e}{hint}") from e


def moment(date: Any) -> datetime.datetime:
    """The date, or date and time, of an ISO string. Raises ValueError for anything else."""
    try:
        return datetime.datetime.fromisoformat(date)
    except (TypeError, ValueError):
        raise ValueError(f"date must be a date in ISO format, such as '2024-07-26', got {date!r}") from None


def plain_messages(messages: str | Sequence[Message]) -> list[dict]:
    """The messages as plain data. A string becomes one user message.

    Keys whose value is None are left out, as in transformers, because templates would print "None".

    Raises:
      ValueError: the messages are neither a string nor a list of {"role": ..., "content": ...}.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not messages or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
        raise ValueError(
            f'a conversation must be a list of messages {{"role": "user", "content": "text"}}, got {messages!r:.200}'
        )
    return plain([{k: v for k, v in m.items() if v is not None} for m in messages], "a conversation")


def plain_tools(tools: Any) -> list[dict] | None:
    """Tools as JSON schemas. For a Python function, transformers makes the schema of type hints and docstring.

    Raises:
      ValueError: the tools are not a list of functions or JSON schemas.
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
    except Exception as e:  # transformers raises exceptions of its own classes
        raise ValueError(f"tools: {function!r} can't be described by a JSON schema: {e}") from e


def plain(value: Any, name: str) -> Any:
    """A copy of JSON data: a template can call none of the original's methods. Raises ValueError for other data.

    ``name`` is what the error calls the data.
    """
    try:
        return json.loads(json.dumps(value, default=dict))
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"{name} must be plain JSON data (strings, numbers, lists, dicts), got {value!r:.200}") from e


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template)


class _Generation(Extension):
    """``{% generation %}`` marks the model's own words, for training. Here only the body of the block is rendered."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """The filter ``tojson`` as in transformers. Jinja's own filter escapes HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message):
    raise jinja2.exceptions.TemplateError(message)
