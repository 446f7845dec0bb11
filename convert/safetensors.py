"""Safetensors checkpoints through the library of that name: one file, or shards with an index, one tensor at a time.

The library holds every length in a header against the file itself, so a file cut short is never read as zeros. This
module adds what the library leaves to its callers: names of files in errors, and whether an index and its shards agree.
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

    file: Path
    dtype: str  # as the format names it
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a checkpoint, known by their headers; iterating reads them one at a time."""

    def __init__(self, entries: dict[str, Entry]):
        self.entries = entries

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor."""
        return ((name, entry.shape) for name, entry in self.entries.items())

    @property
    def dtype(self) -> np.dtype:
        """The widest floating-point dtype among the tensors: no value is rounded in it."""
        floats = {np.dtype(_FLOATS[e.dtype]) for e in self.entries.values() if e.dtype in _FLOATS}
        return np.dtype(jnp.result_type(*floats)) if floats else np.dtype(np.float32)

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array), file by file."""
        for name, entry in self.entries.items():
            with safe_open(entry.file, "np") as file:  # anew for each: pages that were read stay mapped until it closes
                array = file.get_tensor(name)
            yield name, array
            del array  # before the next is read


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Headers of a ``.safetensors`` file, or of a folder's index and its shards, or of its ``model.safetensors``.

    Where a folder has an index, the index alone says which files belong to the model.

    Raises:
      FileNotFoundError: no checkpoint there, or a shard of the index is missing.
      ValueError: a file is damaged, or index and shards contradict each other; it names the file.
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
    """Entries of one file.

    Raises:
      ValueError: the file is cut, padded or malformed, or a tensor has a dtype that is not implemented; it names both.
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
    path = folder / INDEX
    try:
        where = json.loads(path.read_text("utf-8"))["weight_map"]
        files = sorted(set(where.values()))
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
            elif name not in where:
                problems.append(f"{name} is in {file} but not in the index")
            entries[name] = entry
    problems += [f"{n} should be in {f}, and isn't" for n, f in where.items() if n not in entries]
    problems += [f"{n} should be in {f}, and is in {entries[n].file.name}" for n, f in where.items()
                 if n in entries and entries[n].file.name != f]  # fmt: skip
    if problems:
        raise ValueError(f"{path} and its shards contradict each other:\n  " + "\n  ".join(problems[:40]))
    return entries

