"""Prints each figure as soon as it is known, and keeps all figures in a JSON file."""

import json
from pathlib import Path
from typing import Any

from specjax.report.progress import say


class Table:
    """Prints and keeps rows: a name, the milliseconds, the floor, and the ratio of the two.

    Args:
      about: further content of the JSON file: device, versions, arguments, bandwidth.
      path: the JSON file. It is written again after every row, so that a run that is cut short leaves its figures.
        None: no file is written.
    """

    def __init__(self, about: dict[str, Any], path: str | Path | None = None):
        self.about = about
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.sections: dict[str, Any] = {}  # figures that are not rows, by the name of their measurement
        print(f"{'':<44}{'ms':>10} {'floor':>9} {'ratio':>6}")

    def add(self, name: str, seconds: float, floor: float | None = None, note: str = "", **figures: Any) -> None:
        """Adds a row.

        Args:
          name: the name of the measurement.
          seconds: the measured time.
          floor: the shortest possible time in seconds; None: unknown.
          note: a remark that is printed after the figures.
          **figures: further figures, which only the file holds.
        """
        self.rows.append(
            {"name": name, "ms": seconds * 1e3, "floor_ms": floor and floor * 1e3, "note": note, **figures}
        )
        ratio = f"{floor * 1e3:9.3f} {seconds / floor:6.2f}" if floor else " " * 16
        say(f"{name:<44}{seconds * 1e3:10.3f} {ratio}  {note}")
        self.save()

    def save(self) -> None:
        """Writes the JSON file, if there is one."""
        if self.path:
            text = json.dumps({**self.about, "rows": self.rows, **self.sections}, indent=1, allow_nan=False)
            Path(self.path).write_text(text + "\n", encoding="utf-8")
