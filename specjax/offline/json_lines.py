"""A file of JSON lines to which a run adds. A run that was stopped goes on after the last whole line."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class JsonLines:
    """A file of JSON objects, one a line. Half a last line, which a killed run leaves, is removed.

    Args:
      path: the file. It need not be there.
      beginning: how each line begins. So no file of another kind is taken for this one.
      take: gets the object of each line that is there, one at a time, because the file may be larger than memory.
      settings: the settings of the run, which are the first line. None: the file has no such line.

    Raises:
      ValueError: the file holds other lines, or those of a run with other settings. The file is left as it was.
      OSError: the file can't be read or written.
    """

    def __init__(
        self, path: Path, beginning: str, take: Callable[[Any], object], settings: dict[str, Any] | None = None
    ):
        self._path = path
        head, end = None if settings is None else _line(settings), 0
        for number, text in _numbered(path):
            begins = head if head and number == 1 else beginning.encode()
            whole = text.endswith(b"\n")
            if not (text.startswith(begins) or (not whole and begins.startswith(text))):
                raise ValueError(f"{path}, line {number} is {_other(text, begins)}")
            if not whole:
                break
            if begins is not head:
                try:
                    take(json.loads(text))
                except ValueError as problem:
                    raise ValueError(f"{path}, line {number} is damaged: {problem}; remove the line") from problem
            end += len(text)
        with open(path, "ab") as file:
            file.truncate(end)
        if head and not end:
            self._write(head)

    def add(self, value: dict[str, Any]) -> None:
        """Adds a line. The object must begin as the lines of the file do."""
        self._write(_line(value))

    def _write(self, text: bytes) -> None:
        with open(self._path, "ab", buffering=0) as file:  # a killed process loses no bytes in a buffer
            if (written := file.write(text)) < len(text):  # the disk may be full
                raise OSError(f"{self._path}: only {written} of a line's {len(text)} bytes could be written")


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, numbered from 1. Nothing if there is no file."""
    if path.exists():
        with open(path, "rb") as file:
            yield from enumerate(file, 1)


def _other(text: bytes, begins: bytes) -> str:
    """In words, what a line is that does not begin as it should."""
    got, wanted = (part.decode(errors="replace").strip() for part in (text, begins))
    return (
        f"not of this run: {got:.400}; expected a line that begins with {wanted}; give another file, or the settings "
        "with which this file was begun"
    )
