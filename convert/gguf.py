"""Reads GGUF files (versions 2 and 3) with numpy: metadata, tensor table, and dequantised tensors.

Layout as in the GGUF specification of the ggml project: header, key/value metadata, tensor infos, then the data at
the next multiple of the alignment. Quantised tensors are rows of blocks of 32 values, each with its own scale.
"""

import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from convert.safetensors import forget

_CODES = (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12)
_SCALARS = dict(zip(_CODES, "u1 i1 <u2 <i2 <u4 <i4 <f4 ? <u8 <i8 <f8".split(), strict=True))
_STRING, _ARRAY = 8, 9
_NAMES = dict(enumerate(
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL "
    "IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16".split()
))  # fmt: skip
_PLAIN = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_BLOCK = 32
_BLOCKS = {
    "Q8_0": np.dtype([("d", "<f2"), ("q", "i1", 32)]),
    "Q4_0": np.dtype([("d", "<f2"), ("q", "u1", 16)]),
    "Q4_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]),
}


class Info(NamedTuple):
    """One tensor: shape [out, in] as numpy has it (the file lists the fastest dimension first)."""

    shape: tuple[int, ...]
    kind: str
    start: int  # bytes from the start of the file
    stop: int


class GGUF:
    """An open GGUF file: ``metadata`` (str -> int, float, bool, str, list of str, or array) and ``infos`` by name.

    Raises:
      ValueError: not GGUF, another version, a type that is not implemented (named with its tensor), or a file cut
        short, with expected and actual sizes.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        size = self.path.stat().st_size
        if size < 24:
            raise ValueError(f"{path}: {size} bytes, but a GGUF file has at least 24; download it again")
        with open(self.path, "rb") as f:
            self.map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        if self.map[:4] != b"GGUF":
            raise ValueError(f"{path}: starts with {self.map[:4]!r}, expected b'GGUF'")
        cursor = _Cursor(self.path, self.map, 4)
        version = cursor.scalar("<u4")
        if version not in (2, 3):
            raise ValueError(f"{path}: GGUF version {version}; 2 and 3 (little endian) are implemented")
        tensors, pairs = cursor.scalar("<u8"), cursor.scalar("<u8")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("<u4"))
        if self.metadata.get("split.count", 1) > 1:
            raise ValueError(f"{path}: one of {self.metadata['split.count']} pieces; merge them into one file first")
        self.infos = self._read_infos(cursor, tensors)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor."""
        return ((name, info.shape) for name, info in self.infos.items())

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) in file order, dequantised to float32; F16 and BF16 tensors keep their dtype."""
        for name, info in sorted(self.infos.items(), key=lambda item: item[1].start):
            yield name, self.tensor(name)
            forget(self.map, info.start, info.stop)

    def tensor(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32; F16 and BF16 tensors keep their dtype."""
        shape, kind, start, stop = self.infos[name]
        if kind in _PLAIN:
            return np.ndarray(shape, _PLAIN[kind], buffer=self.map, offset=start)
        dtype = _BLOCKS[kind]
        blocks = np.ndarray((stop - start) // dtype.itemsize, dtype, buffer=self.map, offset=start)
        return dequantise(kind, blocks).reshape(shape)

    def _read_infos(self, cursor: "_Cursor", count: int) -> dict[str, Info]:
        found = []
        for _ in range(count):
            name = cursor.string()
            dims = [cursor.scalar("<u8") for _ in range(cursor.scalar("<u4"))]
            code = cursor.scalar("<u4")
            found.append((name, tuple(reversed(dims)), _NAMES.get(code, f"number {code}"), cursor.scalar("<u8")))
        alignment = max(1, self.metadata.get("general.alignment", 32))
        data = math.ceil(cursor.at / alignment) * alignment
        infos: dict[str, Info] = {}
        for name, shape, kind, offset in found:
            if name in infos:
                raise ValueError(f"{self.path}: tensor {name} is given twice")
            size = self._bytes(name, shape, kind)
            infos[name] = Info(shape, kind, data + offset, data + offset + size)
        at = data
        for name, info in sorted(infos.items(), key=lambda item: item[1].start):
            if info.start < at:
                raise ValueError(f"{self.path}: tensor {name} overlaps the one before it")
            at = info.stop
            if at > len(self.map):
                size = len(self.map)
                raise ValueError(f"{self.path}: tensor {name} ends at byte {at}, but the file has {size}: it is cut")
        return infos

    def _bytes(self, name: str, shape: tuple[int, ...], kind: str) -> int:
        count = math.prod(shape)
        if kind in _PLAIN:
            return count * _PLAIN[kind].itemsize
        if kind not in _BLOCKS:
            raise ValueError(
                f"{self.path}: tensor {name} has type {kind}; implemented are {', '.join([*_PLAIN, *_BLOCKS])}. "
                "Use a file in one of those types"
            )
        if not shape or shape[-1] % _BLOCK:
            raise ValueError(f"{self.path}: tensor {name} ({kind} {list(shape)}): rows must be a multiple of {_BLOCK}")
        return count // _BLOCK * _BLOCKS[kind].itemsize


def dequantise(kind: str, blocks: np.ndarray) -> np.ndarray:
    """f32[n, 32] values of n blocks: scale times quant (Q8_0), less 8 (Q4_0), or plus a minimum (Q4_1)."""
    values = np.empty((len(blocks), _BLOCK), np.float32)
    if kind == "Q8_0":
        values[:] = blocks["q"]
    else:  # a byte holds value j in its low half and value j + 16 in its high half
        values[:, :16] = blocks["q"] & 15
        values[:, 16:] = blocks["q"] >> 4
    if kind == "Q4_0":
        values -= 8
    values *= blocks["d"].astype(np.float32)[:, None]
    if kind == "Q4_1":
        values += blocks["m"].astype(np.float32)[:, None]
    return values


class _Cursor:
    """Reads forward, and says so when the file ends early."""

    def __init__(self, path: Path, mapped: mmap.mmap, at: int):
        self.path, self.map, self.at = path, mapped, at

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.map):
            size = len(self.map)
            raise ValueError(f"{self.path}: its header needs at least {end} bytes, but the file has {size}: it is cut")
        self.at = end
        return self.map[end - count : end]

    def scalar(self, form: str) -> Any:
        dtype = np.dtype(form)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def string(self) -> str:
        return self.take(struct.unpack("<Q", self.take(8))[0]).decode("utf-8", errors="replace")

    def value(self, code: int) -> Any:
        if code == _STRING:
            return self.string()
        if code in _SCALARS:
            return self.scalar(_SCALARS[code])
        if code != _ARRAY:
            raise ValueError(f"{self.path}: metadata of unknown type {code} at byte {self.at}")
        inner, count = self.scalar("<u4"), self.scalar("<u8")
        if inner in _SCALARS:
            dtype = np.dtype(_SCALARS[inner])
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        return [self.value(inner) for _ in range(min(count, len(self.map)))]  # every element takes a byte at least
