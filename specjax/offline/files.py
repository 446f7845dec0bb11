"""A file of rows becomes a file of answers. A job that was stopped goes on where the file of answers ends."""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from specjax.engine.engine import Engine
from specjax.offline.json_lines import JsonLines
from specjax.offline.rows import Row, answers, row_of
from specjax.report import progress

BEGINNING = '{"id": '  # of every line of answers


@dataclasses.dataclass
class Totals:
    """What a run of a job has done."""

    # Rows that the file of answers held before the run, and how many of these have an error.
    found: int = 0
    found_errors: int = 0
    # Rows that the run wrote, those with an error included.
    written: int = 0
    # Rows with an error, and new tokens, among those that the run wrote.
    errors: int = 0
    tokens: int = 0

    def count(self, answer: dict[str, Any]) -> None:
        """Counts a row that was written."""
        self.written += 1
        self.errors += "error" in answer
        self.tokens += len(answer.get("tokens", ()))


def run(
    engine: Engine,
    source: Path,
    target: Path,
    defaults: dict[str, Any] | None = None,
    seed: int | None = 0,
    keep_order: bool = False,
) -> Totals:
    """Answers the rows of a file by an engine, as :func:`fill` says.

    Args:
      engine: the engine. If another thread closes it, the run ends after the finished rows.
      source, target, defaults, seed: as in :func:`fill`.
      keep_order: whether answers are written in the order of the rows.

    Raises:
      EngineClosedError: the engine has ended by an error. All rows that ended before are written.
      Exception: as :func:`fill`.
    """
    return fill(partial(answers, engine, keep_order=keep_order), source, target, defaults, seed)


def fill(
    answer: Callable[[Iterator[Row]], Iterator[dict[str, Any]]],
    source: Path,
    target: Path,
    defaults: dict[str, Any] | None = None,
    seed: int | None = 0,
) -> Totals:
    """Answers the rows of ``source`` that ``target`` does not hold yet.

    Both files have one JSON object a line. Each answer is written as soon as its request ends, in one piece. So a job
    may be stopped at any time, and the same call goes on. A half-written last line is removed first.

    Args:
      answer: gives output rows for rows: :func:`specjax.offline.rows.answers` of an engine, or what does the same.
      source: the rows, as :func:`specjax.offline.rows.row_of` describes them. The file is read while the job runs, so
        it may be larger than memory, or a pipe.
      target: the answers. Rows whose id stands there are left out.
      defaults: fields of :class:`specjax.Options` for rows that don't have these fields.
      seed: the row in line n, counted from 0, has the seed ``seed + n`` unless it has its own. None: fresh seeds.

    Raises:
      ValueError: ``target`` holds other lines than answers, or is ``source`` itself. Nothing has been written by then.
      OSError: a file can't be read or written.
    """
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target} is the file of rows itself; give another file for the answers")
    known: dict[str | int, bool] = {}  # whether the answer of each row that is there is an error
    out = JsonLines(target, BEGINNING, lambda found: known.update({found["id"]: "error" in found}))
    totals = Totals(found=len(known), found_errors=sum(known.values()))
    with progress.bar(desc="rows", total=_lines(source), unit=" rows", initial=len(known)) as line:
        for found in answer(_missing(source, known, defaults or {}, seed)):
            out.add(found)
            totals.count(found)
            line.set_postfix(tokens=totals.tokens, errors=totals.errors, refresh=False)
            line.update()
    return totals


def rows_of(source: Path, defaults: dict[str, Any], seed: int | None) -> Iterator[Row]:
    """The rows of a file, one at a time. Empty lines count as lines and give no row."""
    with open(source, "rb") as file:
        for place, text in enumerate(file):
            if not text.strip():
                continue
            try:
                yield row_of(place, json.loads(text), defaults, seed)
            except (ValueError, RecursionError) as problem:  # UnicodeDecodeError is a ValueError
                yield Row(place, place, ValueError(f"line {place + 1} is not JSON: {problem}"))


def _missing(source: Path, known: Collection[str | int], defaults: dict[str, Any], seed: int | None) -> Iterator[Row]:
    """The rows without an answer. A row that has the id of an earlier row is an error."""
    seen: set[str | int] = set()
    for row in rows_of(source, defaults, seed):
        if row.id in seen:
            problem = ValueError(f"an earlier row has the id {row.id!r} too; give every row its own")
            row = Row(row.place, f"{row.id} (line {row.place + 1})", problem)
        seen.add(row.id)
        if row.id not in known:
            yield row


def _lines(source: Path) -> int | None:
    """The number of lines of a file, for the bar; None: the file is a pipe, which can be read only once."""
    if not source.is_file():
        return None
    with open(source, "rb") as file:
        return sum(part.count(b"\n") for part in iter(lambda: file.read(1 << 20), b""))
