"""GGUF files through the ``gguf`` package: metadata, the table of tensors, and one dequantised tensor at a time."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

_PLAIN = {Kind.F32: np.float32, Kind.F16: np.float16, Kind.BF16: ml_dtypes.bfloat16, Kind.F64: np.float64}
_VALUES_AT_A_TIME = 2**22  # values that are dequantised at a time; the memory beside the result is in proportion


class _Reader(GGUFReader):
    """The reader of the gguf package, with two changes.

    The package treats bytes past the end of a file as empty; here they are an error. And this reader reads from a plain
    array, because a vocabulary is several hundred thousand pieces and ``memmap`` takes six times as long for each.
    """

    def _get(self, offset, dtype, count=1, override_order=None):
        if self.byte_order != "I":
            raise ValueError("the byte order is another one, or the version number is damaged")
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"the header refers to byte {end}, but the file ends at {len(self.data)}")
        return self.data.view(np.ndarray)[offset:end].view(dtype)


class GGUF:
    """An open GGUF file.

    ``metadata`` maps keys to int, float, bool, str, or lists of these. ``tensors`` maps names to the package's tensors.

    Raises:
      ValueError: the file is no GGUF file of version 2 or 3, is one of several pieces, is cut short or damaged, or has
        a tensor of a type that can't be dequantised. The message names the file, and the key or tensor.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        size = self.path.stat().st_size
        try:
            reader = _Reader(self.path)
        except (ValueError, KeyError, IndexError, OverflowError) as problem:
            raise ValueError(
                f"{path} ({size} bytes) can't be read as GGUF version 2 or 3: {problem}. If the file should be one, it "
                "is cut short or damaged: download it again"
            ) from problem
        self.map = reader.data._mmap  # type: ignore[attr-defined]
        self.metadata = {name: self._contents(name, field) for name, field in reader.fields.items()}
        if (pieces := self.metadata.get("split.count", 1)) not in (0, 1):
            raise ValueError(f"{path}: one of {pieces} pieces; merge them into one file first")
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        self._check_kinds()
        self._check_places()

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape [out, in]) of every tensor."""
        return ((name, self.shape(name)) for name in self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in numpy's order, [out, in]. The file lists dimensions in reverse."""
        return tuple(reversed(self.tensors[name].shape.tolist()))

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) of every tensor, in the order of the file. The arrays are those of :meth:`tensor`."""
        for name, tensor in sorted(self.tensors.items(), key=lambda item: item[1].data_offset):
            yield name, self.tensor(name)
            _forget(self.map, tensor.data_offset, tensor.data_offset + tensor.n_bytes)

    def tensor(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32. A tensor of a floating-point type keeps its dtype and is read-only."""
        tensor, shape = self.tensors[name], self.shape(name)
        kind, data = tensor.tensor_type, tensor.data
        if kind in _PLAIN:
            return data.view(_PLAIN[kind]).reshape(shape)
        rows = data.reshape(-1, data.shape[-1])
        result = np.empty((len(rows), shape[-1]), np.float32)
        step = max(1, _VALUES_AT_A_TIME // shape[-1])
        for start in range(0, len(rows), step):
            result[start : start + step] = dequantize(rows[start : start + step], kind)
        return result.reshape(shape)

    def _contents(self, name: str, field: Any) -> Any:
        try:
            return field.contents()
        except UnicodeDecodeError as problem:
            raise ValueError(f"{self.path}: metadata key {name} holds text that is not UTF-8: {problem}") from problem

    def _check_kinds(self) -> None:
        """Raises ValueError if a tensor's type can't be dequantised, before many gigabytes are read for nothing."""
        packed = [t for t in self.tensors.values() if t.tensor_type not in _PLAIN and t.n_elements]
        for tensor in {t.tensor_type: t for t in packed}.values():
            try:
                dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], tensor.tensor_type)
            except NotImplementedError as problem:
                raise ValueError(
                    f"{self.path}: tensor {tensor.name} has type {tensor.tensor_type.name}, which the gguf package "
                    "can't dequantise; use a file in another type"
                ) from problem

    def _check_places(self) -> None:
        """Raises ValueError if two tensors overlap. The package doesn't check the offsets."""
        end, before = 0, ""
        for tensor in sorted(self.tensors.values(), key=lambda t: t.data_offset):
            if tensor.data_offset < end:
                raise ValueError(f"{self.path}: tensor {tensor.name} overlaps {before}; download the file again")
            end, before = tensor.data_offset + tensor.n_bytes, tensor.name


def _forget(mapped: mmap.mmap, start: int, stop: int) -> None:
    """Drops pages of a file mapping from this process's memory. If they are needed again, they are read again."""
    if hasattr(mmap, "MADV_DONTNEED"):
        first = start - start % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, first, stop - first)
