"""The tensors in the folder of a published head: safetensors, or a file of ``torch.save``."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from convert import safetensors, torch_file

# Beginnings of the names of files that a trainer leaves beside the weights.
_LEFTOVERS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")


def open_folder(folder: Path, *names: str) -> Iterable[tuple[str, np.ndarray]]:
    """(name, array) of each tensor. One tensor at a time is held.

    Args:
      folder: has safetensors, or one ``.bin``, ``.pt`` or ``.pth`` file of ``torch.save``. If it has both, the
        safetensors are read.
      names: names of safetensors files that are tried before the usual names.

    Raises:
      FileNotFoundError: the folder has no tensors, or several files of torch and no safetensors.
      ValueError: as :func:`safetensors.open_checkpoint` or :func:`torch_file.read`.
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
