"""Trained heads as others publish them: which converter a folder is for."""

from pathlib import Path

from convert import eagle_weights as eagle
from convert import medusa_weights as medusa
from convert.source import read_json
from specjax.decode.types import Drafter
from specjax.models.lm import LM


def load(folder: str | Path, target: LM) -> Drafter:
    """The drafter of a published head, in the target's dtype.

    Args:
      folder: ``config.json`` and the tensors (``.safetensors``, ``.bin`` or ``.pt``) of an EAGLE, EAGLE-2, EAGLE-3 or
        Medusa head.
      target: the model it was trained for.

    Raises:
      FileNotFoundError: nothing usable there.
      ValueError: as of the two converters.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json, so it is no trained head")
    return (medusa if "medusa_num_heads" in read_json(path) else eagle).load(folder, target)
