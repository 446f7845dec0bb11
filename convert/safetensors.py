"""Safetensors checkpoints, read by the library of this name: one file, or shards with an index, one tensor at a time.

The library compares every length in a header with the file itself, so a file that is cut short is never read as zeros.
This module adds two things: errors name the file, and an index is compared with its shards.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = {"F64": jnp.float64, "F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
_OTHERS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")


class Entry(NamedTuple):
    """One tensor of one file."""

    file: Path  # the file that holds the tensor
    dtype: str  # the dtype as the format names it
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a checkpoint. Their headers are read; an iteration reads the tensors, one at a time."""

    def __init__(self, entries: dict[str, Entry]):
        self.entries = entries

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor."""
        return ((name, entry.shape) for name, entry in self.entries.items())

    @property
    def dtype(self) -> np.dtype:
        """A floating-point dtype that holds the values of all tensors without rounding; float32 if none is float."""
        floats = {np.dtype(_FLOATS[e.dtype]) for e in self.entries.values() if e.dtype in _FLOATS}
        return np.dtype(jnp.result_type(*floats)) if floats else np.dtype(np.float32)

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array), file by file."""
        for name, entry in self.entries.items():
            with safe_open(entry.file, "np") as file:  # opened for each tensor, because closing frees the pages read
                array = file.get_tensor(name)
            yield name, array
            del array  # freed before the next tensor is read


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Reads the headers of a checkpoint.

    Args:
      path: a ``.safetensors`` file, a folder with an index and its shards, or a folder with ``model.safetensors``. If a
        folder has an index, only the files of the index belong to the model.

    Raises:
      FileNotFoundError: there is no checkpoint, or a shard of the index is missing.
      ValueError: a file is damaged, or index and shards contradict each other. The message names the file.
    """
    path = Path(path)
    if path.is_file():
        return Checkpoint(read_header(path))
    if (path / INDEX).is_file():
        return Checkpoint(_read_index(path))
    if (path / SINGLE).is_file():
        return Checkpoint(read_header(path / SINGLE))
    other = sorted(p.name for p in path.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".safetensors"))
    found = f"; found {', '.join(other[:5])}: save the model again with safetensors" if other else ""
    raise FileNotFoundError(f"{path} holds neither {INDEX} nor {SINGLE}{found}")


def read_header(path: Path) -> dict[str, Entry]:
    """The entries of one file, by name.

    Raises:
      ValueError: the file is cut, padded or malformed, or a tensor has a dtype that is not implemented. The message
        names the file, and the tensor.
    """
    try:
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            entries = {name: Entry(path, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except SafetensorError as problem:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) can't be read as safetensors: {problem}. If the file should be one, "
            "it is cut short or damaged: download it again"
        ) from problem
    for name, entry in entries.items():
        if entry.dtype not in _FLOATS and entry.dtype not in _OTHERS:
            known = ", ".join([*_FLOATS, *_OTHERS])
            raise ValueError(f"{path}: tensor {name} has dtype {entry.dtype}; implemented are {known}")
    return entries


def _read_index(folder: Path) -> dict[str, Entry]:
    """The entries of all shards, by name. Raises if the shards don't have exactly the tensors of the index."""
    path = folder / INDEX
    try:
        file_of = json.loads(path.read_text("utf-8"))["weight_map"]
        files = sorted(set(file_of.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{path} is not an index with a weight_map {{tensor: file}}: {e}") from None
    if bad := [f for f in files if Path(f).name != f]:
        raise ValueError(f"{path} names {bad[0]!r}, expected plain file names in the same folder")
    if absent := [f for f in files if not (folder / f).is_file()]:
        raise FileNotFoundError(f"{path} lists {', '.join(absent)}, not in the folder; download the missing shards")
    entries: dict[str, Entry] = {}
    problems = []
    for file in files:
        for name, entry in read_header(folder / file).items():
            if name in entries:
                problems.append(f"{name} is in two shards, {entries[name].file.name} and {file}")
            elif name not in file_of:
                problems.append(f"{name} is in {file} but not in the index")
            entries[name] = entry
    problems += [f"{n} should be in {f}, and isn't" for n, f in file_of.items() if n not in entries]
    problems += [f"{n} should be in {f}, and is in {entries[n].file.name}" for n, f in file_of.items()
                 if n in entries and entries[n].file.name != f]  # fmt: skip
    if problems:
        raise ValueError(f"{path} and its shards contradict each other:\n  " + "\n  ".join(problems[:40]))
    return entries

