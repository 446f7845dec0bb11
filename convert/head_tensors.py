"""The tensors of a published head's folder, in whichever format they are."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from convert import safetensors, torch_file

_LEFTOVERS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")  # a trainer's, beside the weights


def open_folder(folder: Path, *names: str) -> Iterable[tuple[str, np.ndarray]]:
    """(name, array) of each tensor, one at a time.

    Args:
      folder: with safetensors, or one ``.bin``, ``.pt`` or ``.pth`` file of ``torch.save``; safetensors go first.
      names: of safetensors files to try before the usual ones.

    Raises:
      FileNotFoundError: no tensors there, or more than one file of torch.
      ValueError: as of the two readers.
    """
    for name in names:
        if (folder / name).is_file():
            return safetensors.open_checkpoint(folder / name)
    if (folder / safetensors.INDEX).is_file() or (folder / safetensors.SINGLE).is_file():
        return safetensors.open_checkpoint(folder)
    files = sorted(p for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth") and p.is_file())
    files = [p for p in files if not p.name.startswith(_LEFTOVERS)]
    if len(files) == 1:
        return torch_file.read(files[0])
    found = f"found {', '.join(p.name for p in files)}; keep the one that holds the head" if files else "found neither"
    wanted = ", ".join([*names, safetensors.SINGLE])
    raise FileNotFoundError(f"{folder} should hold {wanted}, or one .bin or .pt file; {found}")
