"""A script is loaded, or generate.py run, in this process."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def script(name):
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def run(capsys, *args):
    code = script("generate").main(["--max-new-tokens", "12", *args])
    return code, *capsys.readouterr()

