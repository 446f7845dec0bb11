"""Reads prompts from a file, each with the task that it belongs to."""

import json
from pathlib import Path

from specjax.generation.prompts import encode_prompts
from specjax.models.lm import LM

# The eight categories of MT-Bench. Spec-Bench's multi-turn task is MT-Bench, and its prompts have these categories.
MT_BENCH = frozenset("writing roleplay reasoning math coding extraction stem humanities".split())


def read_prompts(path: str | Path) -> list[tuple[str, str]]:
    """The (task, prompt) pair of each line of a file.

    A line is a JSON object with ``turns``, of which the first is the prompt, or with ``prompt``. Any other line is a
    prompt itself. The task is the object's ``category``. The categories of MT-Bench are one task, "mt-bench". Without a
    category the task is "all". The file is in UTF-8. Only newlines end a line: other line separators, such as U+2028,
    are part of the text.

    Raises:
      OSError: the file can't be read.
      ValueError: a line is not JSON, has neither ``turns`` nor ``prompt``, or the file has no prompt.
    """
    found = []
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
        turns = entry.get("turns")
        prompt = entry.get("prompt") or (turns[0] if isinstance(turns, list) and turns else None)
        if not isinstance(prompt, str):
            raise ValueError(f'{path}, line {number} has neither a "prompt" nor "turns"; give one of the two')
        task = str(entry.get("category", "all"))
        found.append(("mt-bench" if task in MT_BENCH else task, prompt))
    if not found:
        raise ValueError(f"{path} holds no prompt")
    return found


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
    found = [(task, encode_prompts(lm, [prompt], chat=True)[0]) for task, prompt in read_prompts(path)]
    short = [(task, ids) for task, ids in found if len(ids) <= longest]
    if not short:
        raise ValueError(f"{path} holds no prompt of at most {longest} tokens")
    return short
