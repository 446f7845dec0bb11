"""Trained heads as others publish them: chooses the converter for a folder."""

from pathlib import Path

from convert import dflash_weights as dflash
from convert import eagle_weights as eagle
from convert import medusa_weights as medusa
from specjax.checkpoints.json_file import read_json
from specjax.decode.types import Drafter
from specjax.models.lm import LM


def load(folder: str | Path, target: LM) -> Drafter:
    """The drafter of a published head, in the target's dtype.

    Args:
      folder: has ``config.json`` and the tensors (``.safetensors``, ``.bin`` or ``.pt``) of an EAGLE, EAGLE-2, EAGLE-3,
        DFlash or Medusa head.
      target: the model that the head was trained for.

    Raises:
      FileNotFoundError: the folder has no config or no tensors.
      ValueError: as :func:`convert.eagle_weights.load`, :func:`convert.dflash_weights.load` or
        :func:`convert.medusa_weights.load`.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json, so it is no trained head")
    said = read_json(path)
    kind = medusa if "medusa_num_heads" in said else dflash if said.get(dflash.KEY) is not None else eagle
    return kind.load(folder, target)
