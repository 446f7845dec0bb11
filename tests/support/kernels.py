"""Counts the kernels that a program compiled for a GPU launches."""

import re
from typing import Any

# Operations that launch nothing: they name, take apart or view buffers.
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"}


def kernels(compiled: Any) -> int:
    """The kernels and copies of one run. A loop counts as one turn of its body and its condition."""
    text, bodies, name = compiled.as_text(), {}, ""
    for line in text.splitlines():
        if found := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = found[1]
        bodies.setdefault(name, []).append(line)

    def count(body: str) -> int:
        return sum(of_line(line) for line in bodies[body])

    def of_line(line: str) -> int:
        operation = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][\w\-]*)\(", line)
        if operation is None or operation[1] in FREE:
            return 0
        if operation[1] in ("while", "call", "conditional"):
            return sum(map(count, re.findall(r"(?:body|condition|to_apply|computation)=%?([\w.\-]+)", line)))
        return 1

    return count(re.search(r"ENTRY %?([\w.\-]+) ", text)[1])
