"""Reads prompts from a file, each with the task that it belongs to."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.generation.prompts import encode_prompts
from specjax.measure.spec_bench import Question
from specjax.models.lm import LM
from specjax.models.model import check_no_encoder

# The eight categories of MT-Bench. Spec-Bench's multi-turn task is MT-Bench, and its prompts have these categories.
MT_BENCH = frozenset("writing roleplay reasoning math coding extraction stem humanities".split())


def _entries(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of each line of a file, from 1, and the line as an object. A plain line is an object with ``prompt``.

    The file is in UTF-8. Only newlines end a line: other line separators, such as U+2028, are part of the text.

    Raises:
      OSError: the file can't be read.
      ValueError: a line is not JSON.
    """
    text = Path(path).read_bytes().decode("utf-8-sig")  # in Python's text mode a carriage return would end a line
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        entry = {"prompt": line}
        if line.startswith("{"):
            try:
                entry = json.loads(line)
            except ValueError as problem:
                raise ValueError(f"{path}, line {number} is not JSON: {problem}") from problem
        yield number, entry


def _task(entry: dict[str, Any]) -> str:
    """The task of a line: its category. The categories of MT-Bench are one task. Without a category: "all"."""
    task = str(entry.get("category", "all"))
    return "mt-bench" if task in MT_BENCH else task


def read_prompts(path: str | Path) -> list[tuple[str, str]]:
    """The (task, prompt) pair of each line of a file.

    A line is a JSON object with ``turns``, of which the first is the prompt, or with ``prompt``. Any other line is a
    prompt itself. The task is the object's ``category``. The categories of MT-Bench are one task, "mt-bench". Without a
    category the task is "all".

    Raises:
      OSError: the file can't be read.
      ValueError: a line is not JSON, has neither ``turns`` nor ``prompt``, or the file has no prompt.
    """
    found = []
    for number, entry in _entries(path):
        turns = entry.get("turns")
        prompt = entry.get("prompt") or (turns[0] if isinstance(turns, list) and turns else None)
        if not isinstance(prompt, str):
            raise ValueError(f'{path}, line {number} has neither a "prompt" nor "turns"; give one of the two')
        found.append((_task(entry), prompt))
    if not found:
        raise ValueError(f"{path} holds no prompt")
    return found


def read_questions(path: str | Path, per_task: int | None = None) -> list[Question]:
    """The questions of a file of Spec-Bench, with all their turns.

    Args:
      path: the file. Each line is a JSON object with ``turns``, ``category`` and ``question_id``.
      per_task: how many questions of each task, spread over the file. None: all.

    Raises:
      OSError: the file can't be read.
      ValueError: a line is not JSON or no question, an id stands twice, or the file has no question.
    """
    by_task: dict[str, list[Question]] = {}
    known: set[int] = set()
    for number, entry in _entries(path):
        turns, name = entry.get("turns"), entry.get("question_id")
        if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
            raise ValueError(f'{path}, line {number} has no "turns", a list of texts, as each line of Spec-Bench has')
        if not isinstance(name, int) or name in known:
            raise ValueError(f'{path}, line {number} needs a "question_id" of its own, a number, got {name!r}')
        known.add(name)
        by_task.setdefault(_task(entry), []).append(Question(name, _task(entry), tuple(turns)))
    if not by_task:
        raise ValueError(f"{path} holds no question")
    size = max(map(len, by_task.values())) if per_task is None else per_task
    spread = (questions[:: max(1, len(questions) // size)][:size] for questions in by_task.values())
    return [question for questions in spread for question in questions]


def encoded_prompts(lm: LM, path: str | Path, longest: int) -> list[tuple[str, list[int]]]:
    """The (task, token ids) pair of each prompt of a file, in the chat template. Longer prompts are left out.

    Args:
      lm: the model.
      path: the file, as in :func:`read_prompts`.
      longest: the largest number of tokens.

    Raises:
      OSError: the file can't be read.
      ValueError: as in :func:`read_prompts`; or every prompt is longer, or the model has no tokenizer.
    """
    check_no_encoder(lm, "a file of chats")
    found = [(task, encode_prompts(lm, [prompt], chat=True)[0]) for task, prompt in read_prompts(path)]
    short = [(task, ids) for task, ids in found if len(ids) <= longest]
    if not short:
        raise ValueError(f"{path} holds no prompt of at most {longest} tokens")
    return short
