"""Where the figures go: a line of text as soon as each is known, and a JSON file."""

import json
from pathlib import Path
from typing import Any

from specjax.report.progress import say


class Table:
    """Prints and keeps rows: what, milliseconds, the floor, their ratio.

    Args:
      about: what the JSON file says beside the rows: device, versions, arguments, bandwidth.
      path: the file, written anew with every row, so that a run cut short leaves what it has; None: none.
    """

    def __init__(self, about: dict[str, Any], path: str | Path | None = None):
        self.about = about
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.sections: dict[str, Any] = {}  # figures that are no row, by the name of what measured them
        print(f"{'':<44}{'ms':>10} {'floor':>9} {'ratio':>6}")

    def add(self, name: str, seconds: float, floor: float | None = None, note: str = "", **figures: Any) -> None:
        """A row; ``floor`` in seconds, ``figures`` for the file only."""
        self.rows.append(
            {"name": name, "ms": seconds * 1e3, "floor_ms": floor and floor * 1e3, "note": note, **figures}
        )
        ratio = f"{floor * 1e3:9.3f} {seconds / floor:6.2f}" if floor else " " * 16
        say(f"{name:<44}{seconds * 1e3:10.3f} {ratio}  {note}")
        self.save()

    def save(self) -> None:
        if self.path:
            text = json.dumps({**self.about, "rows": self.rows, **self.sections}, indent=1, allow_nan=False)
            Path(self.path).write_text(text + "\n", encoding="utf-8")
