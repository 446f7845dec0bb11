"""The safetensors reader: bit-exact values, an index that decides, and damaged files refused by name and size."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from convert.safetensors import open_checkpoint


def write(path, tensors, pad=0):
    """A safetensors file written by hand, so that bfloat16 needs no other library."""
    names = {np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype("f2"): "F16", np.dtype("f4"): "F32", np.dtype("i8"): "I64"}
    header, at = {"__metadata__": {"note": "x" * pad}}, 0
    for name, array in tensors.items():
        span = [at, at := at + array.nbytes]
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": span}
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(a.tobytes() for a in tensors.values()))


def mixed():
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16), "b": rng.normal(size=(7,)).astype(np.float16),
        "c": rng.normal(size=(2, 2, 2)).astype(np.float32), "scalar": np.array(1.5, np.float32),
        "empty": np.zeros((0, 4), np.float16), "ints": np.arange(3),
    }  # fmt: skip


def test_every_dtype_is_bit_exact(tmp_path):
    tensors = mixed()
    write(tmp_path / "model.safetensors", tensors)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        read = dict(open_checkpoint(path))
        assert read.keys() == tensors.keys()
        for name, array in tensors.items():
            assert read[name].dtype == array.dtype and read[name].shape == array.shape
            assert read[name].tobytes() == array.tobytes(), name
    assert open_checkpoint(tmp_path).dtype == np.float32
    save_file({k: v for k, v in tensors.items() if v.dtype != ml_dtypes.bfloat16}, tmp_path / "other.safetensors")
    assert (dict(open_checkpoint(tmp_path / "other.safetensors"))["b"] == tensors["b"]).all()


def test_reading_safetensors_imports_no_torch():
    code = "import sys, convert.source, specjax.checkpoints.load; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def damage(raw):
    """Name of the damage -> (bytes, words that the error has beside the file's name and size)."""
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    data = raw[8 + length :]

    def with_header(change):
        new = json.loads(json.dumps(header))
        change(new)
        text = json.dumps(new).encode()
        return len(text).to_bytes(8, "little") + text + data

    text = raw[8 : 8 + length].replace(b'"b":', b'"a":', 1)
    twice = len(text).to_bytes(8, "little") + text + data
    return {
        "cut in header": (raw[: 8 + length // 2], "header"),
        "cut by a byte": (raw[:-1], "not fully covered|Incomplete"),
        "trailing bytes": (raw + b"xyz", "not fully covered|Incomplete"),
        "no bytes": (b"", "header"),
        "giant header": ((2**40).to_bytes(8, "little") + raw[8:], "header"),
        "invalid JSON": (raw[:8] + b"!" * length + data, "header"),
        "not UTF-8": (raw[:8] + b"\xff" * length + data, "header"),
        "a list": ((2).to_bytes(8, "little") + b"[]" + data, "header"),
        "overlap": (with_header(lambda h: h["b"].update(data_offsets=[0, 14])), "header"),
        "hole": (with_header(lambda h: h.pop("b")), "header"),
        "shape": (with_header(lambda h: h["b"].update(shape=[8])), "header"),
        "overflow": (with_header(lambda h: h["b"].update(shape=[2**62, 2**62])), "header"),
        "negative": (with_header(lambda h: h["b"].update(shape=[-7])), "header"),
        "unknown dtype": (with_header(lambda h: h["b"].update(dtype="Q4")), "header"),
        "no offsets": (with_header(lambda h: h["b"].pop("data_offsets")), "header"),
        "a name given twice": (twice, "header"),
    }


def test_damaged_safetensors_are_refused(tmp_path):
    whole = tmp_path / "whole.safetensors"
    write(whole, mixed())
    bad = tmp_path / "model.safetensors"
    for name, (raw, words) in damage(whole.read_bytes()).items():
        bad.write_bytes(raw)
        says = rf"(?i)model.safetensors \({len(raw)} bytes\) can't be read.*({words})"
        with pytest.raises(ValueError, match=says) as error:
            open_checkpoint(tmp_path)
        assert str(bad) in str(error.value), name


def test_dtypes_that_numpy_lacks_are_refused_by_name(tmp_path):
    header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(ValueError, match="model.safetensors: tensor a has dtype F8_E4M3; implemented are F64, F32"):
        open_checkpoint(tmp_path)


def test_reading_keeps_no_file_open(tmp_path):
    """What has been read of a mapped file counts as memory of the process until the file is closed."""
    write(tmp_path / "model.safetensors", mixed())
    for _ in open_checkpoint(tmp_path):
        maps = Path("/proc/self/maps")
        assert not maps.is_file() or str(tmp_path) not in maps.read_text()


def test_large_header_is_read(tmp_path):
    write(tmp_path / "model.safetensors", mixed(), pad=100_000)
    assert (dict(open_checkpoint(tmp_path))["c"] == mixed()["c"]).all()


def shards(folder, weight_map=None):
    t = mixed()
    write(folder / "s1.safetensors", {"a": t["a"], "b": t["b"]})
    write(folder / "s2.safetensors", {"c": t["c"]})
    weight_map = weight_map or {"a": "s1.safetensors", "b": "s1.safetensors", "c": "s2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return t


def test_the_index_decides_which_files_are_read(tmp_path):
    tensors = shards(tmp_path)
    write(tmp_path / "model.safetensors", {"a": tensors["a"] + 1, "stray": tensors["c"]})
    read = {name: array.copy() for name, array in open_checkpoint(tmp_path)}
    assert read.keys() == {"a", "b", "c"} and (read["a"] == tensors["a"]).all()
    write(tmp_path / "s2.safetensors", {"c": tensors["c"], "a": tensors["a"]})
    with pytest.raises(ValueError, match="a is in two shards, s1.safetensors and s2.safetensors"):
        open_checkpoint(tmp_path)


def test_index_and_shards_must_agree(tmp_path):
    s1, s2 = "s1.safetensors", "s2.safetensors"
    for weight_map, words, kind in [
        ({"a": s1, "c": s2}, "b is in s1.safetensors but not in the index", ValueError),
        ({"a": s1, "b": s1, "c": s2, "d": s2}, "d should be in s2.safetensors", ValueError),
        ({"a": s1, "b": s2, "c": s2}, "b should be in s2.safetensors, and is in s1", ValueError),
        ({"a": "../s1.safetensors"}, "plain file names", ValueError),
        ({"a": s1, "b": s1, "c": "s3.safetensors"}, "s3.safetensors", FileNotFoundError),
    ]:
        shards(tmp_path, weight_map)
        with pytest.raises(kind, match=words):
            open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="weight_map"):
        open_checkpoint(tmp_path)


def test_no_checkpoint(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin"):
        open_checkpoint(tmp_path)

