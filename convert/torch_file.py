"""Files of ``torch.save``, read without torch. Such a file is a zip archive of raw storages and a pickle.

The pickle describes the tensors and their storages. A pickle can call any function, so a stranger's file could run
code. Here a pickle may call only the functions in ``_ALLOWED``, which make descriptions of tensors. The layout is that
of torch's ``torch/serialization.py`` since release 1.6.
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
# The first bytes of a file of an older torch: a pickled magic number.
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


# The exceptions that zipfile, pickle and numpy raise for damaged bytes.
_DAMAGE = (zipfile.BadZipFile, pickle.UnpicklingError, ValueError, TypeError, AttributeError, LookupError, EOFError,
           NotImplementedError, OverflowError)  # fmt: skip


class _Storage(NamedTuple):
    """The description of a storage."""

    dtype: str  # numpy's name of the dtype
    key: str  # the name of its file in the archive
    size: int  # the number of elements


class _Tensor(NamedTuple):
    """The description of a tensor."""

    storage: _Storage
    offset: int  # the place of the first element in the storage, in elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements


class _Rebuild:
    """Stands for ``torch._utils._rebuild_tensor_v2``. A pickle could ask to set attributes; here it can set none."""

    __slots__ = ()

    def __call__(self, storage, offset, shape, strides, *_):
        numbers = [offset, *shape, *strides]
        if not isinstance(storage, _Storage) or len(shape) != len(strides):
            raise ValueError("a tensor without storage, or with another number of strides than dimensions")
        if any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"a tensor of offset {offset}, shape {shape} and strides {strides}")
        return _Tensor(storage, offset, tuple(shape), tuple(strides))


class _Parameter:
    """Stands for ``torch._utils._rebuild_parameter``."""

    __slots__ = ()

    def __call__(self, tensor, *_):
        return tensor


# (module, name) that a pickle may ask for -> what it gets.
_ALLOWED = {
    ("torch._utils", "_rebuild_tensor_v2"): _Rebuild(),
    ("torch._utils", "_rebuild_parameter"): _Parameter(),
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


class _Unpickler(pickle.Unpickler):
    """Reads a pickle of tensors, and refuses any other."""

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
    """(name, array) of each tensor in a ``.bin`` or ``.pt`` file that holds a dict of tensors. One is read at a time.

    Raises:
      ValueError: the file is not of torch, is of torch before 1.6, or is damaged, or its pickle asks for anything but
        tensors. The message names the file.
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
    """The contents of a pickle. Raises ValueError unless they are a dict of tensors by name."""
    if not isinstance(found, dict):
        raise ValueError(f"the file holds a {type(found).__name__}, expected a dict of tensors")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, _Tensor):
            kind = type(value).__name__
            raise ValueError(f"the entry {str(name)[:200]!r} is a {kind}, expected a name and a tensor")
    return found


def _array(archive: zipfile.ZipFile, root: str, name: str, tensor: _Tensor) -> np.ndarray:
    """Reads a tensor. Raises ValueError if it does not lie inside its storage."""
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
