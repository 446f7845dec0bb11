"""Reads safetensors checkpoints: one file, or shards with an index. Memory-mapped, and strict about sizes.

Format: u64 header length (little endian), that many bytes of JSON {name: {dtype, shape, data_offsets}}, then the data.
A file cut short must never be read as zeros, so every length in the header is checked against the file itself.
"""

import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100_000_000  # the format's own limit: a damaged length must not become a giant allocation
_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


class Entry(NamedTuple):
    """One tensor of one file."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    stop: int


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
        floats = {e.dtype for e in self.entries.values() if jnp.issubdtype(e.dtype, jnp.floating)}
        return np.dtype(jnp.result_type(*floats)) if floats else np.dtype(np.float32)

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, read-only array) in the order of the files. The pages of one are let go before the next is read."""
        maps: dict[Path, mmap.mmap] = {}
        for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].file, item[1].start)):
            if entry.file not in maps:
                with open(entry.file, "rb") as f:
                    maps = {entry.file: mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)}
            yield name, np.ndarray(entry.shape, entry.dtype, buffer=maps[entry.file], offset=entry.start)
            forget(maps[entry.file], entry.start, entry.stop)


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
    """Entries of one file, after checking that they tile its data exactly.

    Raises:
      ValueError: the file is cut, padded or malformed; the message has its name, expected and actual sizes.
    """
    size = path.stat().st_size
    if size < 8:
        raise ValueError(f"{path}: {size} bytes, but a safetensors file has at least 8; download it again")
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if length > size - 8 or length > _MAX_HEADER:
            raise ValueError(
                f"{path}: its first 8 bytes announce a header of {length} bytes, so at least {8 + length} bytes "
                f"(headers end at {_MAX_HEADER}), but the file has {size}; it is cut short or no safetensors file"
            )
        raw = f.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except ValueError as e:  # bad UTF-8, bad JSON, or a name given twice
        raise ValueError(f"{path}: the {length}-byte header (file: {size} bytes) is not valid JSON: {e}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is a JSON {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, info, 8 + length) for name, info in header.items()}
    _check_tiling(path, entries, 8 + length, size)
    return entries


def forget(mapped: mmap.mmap, start: int, stop: int) -> None:
    """Drops pages of a file mapping from this process; they are read from the file again if needed."""
    if hasattr(mmap, "MADV_DONTNEED"):
        first = start - start % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, first, stop - first)


def _entry(path: Path, name: str, info: Any, data: int) -> Entry:
    try:
        dtype, shape, (start, stop) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        numbers = [*shape, start, stop]
        if any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{path}: tensor {name} has the entry {str(info)[:200]}, "
            "expected dtype, shape and data_offsets [start, stop]"
        ) from None
    if dtype not in _DTYPES:
        raise ValueError(f"{path}: tensor {name} has dtype {dtype}; known are {', '.join(_DTYPES)}")
    need = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
    if stop - start != need:
        raise ValueError(f"{path}: tensor {name} ({dtype} {list(shape)}) needs {need} bytes, not {stop - start}")
    return Entry(path, np.dtype(_DTYPES[dtype]), shape, data + start, data + stop)


def _check_tiling(path: Path, entries: dict[str, Entry], data: int, size: int) -> None:
    at = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != at:
            kind = "overlaps the tensor before it" if entry.start < at else "leaves a hole before it"
            raise ValueError(f"{path}: tensor {name} starts at byte {entry.start}, expected {at}: it {kind}")
        at = entry.stop
    if at != size:
        what = "it is cut short" if size < at else "it has trailing bytes"
        raise ValueError(f"{path}: the header describes {at} bytes, but the file has {size}: {what}; download it again")


def _read_index(folder: Path) -> dict[str, Entry]:
    path = folder / INDEX
    try:
        where = json.loads(path.read_text("utf-8"), object_pairs_hook=_no_duplicates)["weight_map"]
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


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is given twice")
    return result
