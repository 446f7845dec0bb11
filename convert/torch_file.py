"""Files of ``torch.save``, read without torch: a zip archive of raw storages, and a pickle that says what they hold.

A pickle can call anything. This one may call only what is listed here, which makes descriptions of tensors, so a file
from a stranger can't run code. Layout as in torch's ``torch/serialization.py`` since its release 1.6.
"""

import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

_STORAGES = {
    "DoubleStorage": "f8", "FloatStorage": "f4", "HalfStorage": "f2", "BFloat16Storage": "bfloat16",
    "LongStorage": "i8", "IntStorage": "i4",
    "ShortStorage": "i2", "CharStorage": "i1", "ByteStorage": "u1", "BoolStorage": "?",
}  # fmt: skip
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickled magic number


# What zipfile, pickle and numpy raise over bytes that make no sense.
_DAMAGE = (zipfile.BadZipFile, pickle.UnpicklingError, ValueError, TypeError, AttributeError, LookupError, EOFError,
           NotImplementedError, OverflowError)  # fmt: skip


class _Storage(NamedTuple):
    dtype: str
    key: str
    size: int  # elements


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int  # in elements, as the strides
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Rebuild:
    """``torch._utils._rebuild_tensor_v2``. No attribute can be set on it, which a pickle could ask for."""

    __slots__ = ()

    def __call__(self, storage, offset, shape, strides, *_):
        numbers = [offset, *shape, *strides]
        if not isinstance(storage, _Storage) or len(shape) != len(strides):
            raise ValueError("a tensor without storage, or with another number of strides than dimensions")
        if any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"a tensor of offset {offset}, shape {shape} and strides {strides}")
        return _Tensor(storage, offset, tuple(shape), tuple(strides))


class _Parameter:
    """``torch._utils._rebuild_parameter``."""

    __slots__ = ()

    def __call__(self, tensor, *_):
        return tensor


_ALLOWED = {
    ("torch._utils", "_rebuild_tensor_v2"): _Rebuild(),
    ("torch._utils", "_rebuild_parameter"): _Parameter(),
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, which is no part of a tensor")
        return _ALLOWED[module, name]

    def persistent_load(self, pid):
        kind, dtype, key, _, count = pid
        if kind != "storage" or dtype not in _STORAGES.values() or type(key) is not str or type(count) is not int:
            raise pickle.UnpicklingError(f"the pickle refers to {str(pid)[:200]}, expected a storage")
        return _Storage(dtype, key, count)


def read(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of each tensor of a ``.bin`` or ``.pt`` file that holds a dict of tensors; one is read at a time.

    Raises:
      ValueError: a file of torch before 1.6, or none of torch; a pickle that asks for anything but tensors; damage. The
        message names the file, and says what to do.
    """
    with open(path, "rb") as file:
        if file.read(len(_LEGACY)) == _LEGACY:
            raise ValueError(
                f"{path} has the format of torch before 1.6; write the file again once, where torch is installed: "
                f"python -c \"import torch; f = '{path}'; torch.save(torch.load(f, 'cpu', weights_only=True), f)\""
            )
    try:
        with zipfile.ZipFile(path) as archive:
            root = next((name[: -len("data.pkl")] for name in archive.namelist() if name.endswith("/data.pkl")), None)
            if root is None:
                raise ValueError("the archive has no data.pkl")
            if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
                raise ValueError("the numbers are big-endian")
            with archive.open(f"{root}data.pkl") as pickled:
                found = _Unpickler(pickled).load()
            for name, tensor in _named(found).items():
                yield name, _array(archive, root, name, tensor)
    except _DAMAGE as problem:
        raise ValueError(f"{path} can't be read as a file of tensors that torch.save wrote: {problem}") from problem


def _named(found: Any) -> dict[str, _Tensor]:
    if not isinstance(found, dict):
        raise ValueError(f"the file holds a {type(found).__name__}, expected a dict of tensors")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, _Tensor):
            kind = type(value).__name__
            raise ValueError(f"the entry {str(name)[:200]!r} is a {kind}, expected a name and a tensor")
    return found


def _array(archive: zipfile.ZipFile, root: str, name: str, tensor: _Tensor) -> np.ndarray:
    storage, dtype = tensor.storage, np.dtype(getattr(ml_dtypes, tensor.storage.dtype, tensor.storage.dtype))
    member = archive.getinfo(f"{root}data/{storage.key}")
    count = math.prod(tensor.shape)
    last = tensor.offset + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
    inside = count <= storage.size and (count == 0 or last < storage.size)
    if member.file_size != storage.size * dtype.itemsize or not inside:
        raise ValueError(
            f"tensor {name} {list(tensor.shape)} reaches element {last} of a storage of {storage.size} ({dtype}) "
            f"with {member.file_size} bytes"
        )
    flat = np.frombuffer(archive.read(member), dtype)[tensor.offset :]
    strides = [stride * dtype.itemsize for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False).copy(order="C")
