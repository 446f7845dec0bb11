"""Verifiers, with the names that ``generate(verifier=...)`` takes.

The last three of ``VERIFIERS`` are lossy: lenient, lenient-greedy and typical. ``generate`` refuses them unless
``lossy=True``.
"""

from typing import Any

from specjax.verify.block import Block
from specjax.verify.coupled import Coupled
from specjax.verify.lossy import Lenient, LenientGreedy, TypicalAcceptance
from specjax.verify.rejection import Rejection
from specjax.verify.siblings import without_replacement
from specjax.verify.traversal import Traversal

VERIFIERS: dict[str, Any] = {
    "rejection": Rejection(),
    "coupled": Coupled(),
    "block": Block(),
    "traversal": Traversal(),
    "lenient": Lenient(),
    "lenient-greedy": LenientGreedy(),
    "typical": TypicalAcceptance(),
}

__all__ = [
    "VERIFIERS",
    "Block",
    "Coupled",
    "Lenient",
    "LenientGreedy",
    "Rejection",
    "Traversal",
    "TypicalAcceptance",
    "without_replacement",
]
