"""Reads the JSON files of a checkpoint."""

import json
from pathlib import Path


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises ValueError if the file holds anything else, OSError if it can't be read."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except ValueError as e:
        raise ValueError(f"{path} is not valid JSON: {e}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a JSON {type(data).__name__}, expected an object")
    return data
