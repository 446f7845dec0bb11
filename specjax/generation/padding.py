"""Lists of different lengths as one array."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def padded(rows: Sequence[Sequence[Any]], filler: Any, dtype: Any) -> np.ndarray:
    """B lists as one array [B, E], padded with ``filler``.

    E is a power of two and at least 4. A slightly longer list thus seldom needs another compiled program.
    """
    longest = max(map(len, rows))
    lines = np.full((len(rows), max(4, 1 << max(0, longest - 1).bit_length())), filler, dtype)
    for line, row in zip(lines, rows, strict=True):
        line[: len(row)] = row
    return lines
