"""Prompts from a file, with the task each belongs to."""

import json
from pathlib import Path

from specjax.generation.prompts import encode_prompts
from specjax.models.lm import LM

# Spec-Bench's multi-turn task is MT-Bench, whose prompts carry its eight categories.
MT_BENCH = frozenset("writing roleplay reasoning math coding extraction stem humanities".split())


def read_prompts(path: str | Path) -> list[tuple[str, str]]:
    """(task, prompt) of each line: JSON with ``turns`` (the first is taken) or ``prompt``, else the line itself.

    The task is the line's ``category``; those of MT-Bench are one task, "mt-bench", and "all" stands for none given.
    The file is UTF-8. Lines end at newlines alone: U+2028 and the like, which end lines elsewhere, are text.

    Raises:
      OSError: the file can't be read.
      ValueError: a line has neither, or there is no line.
    """
    found = []
    text = Path(path).read_bytes().decode("utf-8-sig")  # read as text, a carriage return would end a line
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
            raise ValueError(f'{path}, line {number} has neither a "prompt" nor "turns"')
        task = str(entry.get("category", "all"))
        found.append(("mt-bench" if task in MT_BENCH else task, prompt))
    if not found:
        raise ValueError(f"{path} holds no prompt")
    return found


def encoded_prompts(lm: LM, path: str | Path, longest: int) -> list[tuple[str, list[int]]]:
    """(task, token ids in the chat template) of each prompt of a file that has at most ``longest`` tokens.

    Raises:
      OSError, ValueError: as :func:`read_prompts`, or if none is short enough or the model has no tokenizer.
    """
    found = [(task, encode_prompts(lm, [prompt], chat=True)[0]) for task, prompt in read_prompts(path)]
    short = [(task, ids) for task, ids in found if len(ids) <= longest]
    if not short:
        raise ValueError(f"{path} holds no prompt of at most {longest} tokens")
    return short
