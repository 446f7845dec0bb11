"""A conversion by scripts/convert.py in this process, and one that measures its memory in a process of its own."""

import sys

from commands import script


def run_script(*arguments):
    """(exit code) of scripts/convert.py, in this process."""
    before, sys.argv = sys.argv, ["convert.py", *map(str, arguments)]
    try:
        return script("convert").main()
    finally:
        sys.argv = before


MEASURE = """
import sys
from convert import checkpoint
from convert.source import open_source

def convert(name):
    source = open_source(f"{sys.argv[1]}/{name}")
    checkpoint.save(f"{sys.argv[1]}/{name}-own", source.config, source.fill())

def peak():  # not ru_maxrss: a new process starts with its parent's
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

convert("small")  # what the libraries themselves take
before = peak()
convert("large")
print(peak() - before)
"""
