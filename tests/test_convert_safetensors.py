"""The safetensors reader: bit-exact values, an index that decides, and damaged files refused by name and size."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from convert.safetensors import open_checkpoint, read_header


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


def test_b79_every_dtype_is_bit_exact(tmp_path):
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


def test_b79_no_torch_is_imported():
    code = "import sys, convert.source, specjax.load; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def damage(raw):
    """Name of the damage -> (bytes, words that the error must have)."""
    size = len(raw)
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    data = raw[8 + length :]

    def with_header(change):
        new = json.loads(json.dumps(header))
        change(new)
        text = json.dumps(new).encode()
        return len(text).to_bytes(8, "little") + text + data

    return {
        "cut in header": (raw[: 8 + length // 2], [str(8 + length), str(8 + length // 2)]),
        "cut by a byte": (raw[:-1], [str(size), str(size - 1)]),
        "trailing bytes": (raw + b"xyz", [str(size), str(size + 3)]),
        "no bytes": (b"", ["0 bytes", "at least 8"]),
        "giant header": ((2**40).to_bytes(8, "little") + raw[8:], [str(2**40), str(size)]),
        "invalid JSON": (raw[:8] + b"!" * length + data, ["not valid JSON", str(size)]),
        "not UTF-8": (raw[:8] + b"\xff" * length + data, ["not valid JSON"]),
        "a list": ((2).to_bytes(8, "little") + b"[]" + data, ["expected an object"]),
        "overlap": (with_header(lambda h: h["b"].update(data_offsets=[0, 14])), ["overlaps"]),
        "hole": (with_header(lambda h: h.pop("b")), ["hole"]),
        "shape": (with_header(lambda h: h["b"].update(shape=[8])), ["tensor b", "16 bytes", "14"]),
        "negative": (with_header(lambda h: h["b"].update(shape=[-7])), ["tensor b", "-7"]),
        "dtype": (with_header(lambda h: h["b"].update(dtype="Q4")), ["tensor b", "Q4"]),
        "no offsets": (with_header(lambda h: h["b"].pop("data_offsets")), ["tensor b", "data_offsets"]),
    }


def test_b80_damaged_safetensors_are_refused(tmp_path):
    whole = tmp_path / "whole.safetensors"
    write(whole, mixed())
    bad = tmp_path / "model.safetensors"
    for name, (raw, words) in damage(whole.read_bytes()).items():
        bad.write_bytes(raw)
        with pytest.raises(ValueError) as error:
            open_checkpoint(tmp_path)
        assert all(word in str(error.value) for word in [str(bad), *words]), (name, str(error.value))


def test_b80_large_header_is_read(tmp_path):
    write(tmp_path / "model.safetensors", mixed(), pad=100_000)
    assert (dict(open_checkpoint(tmp_path))["c"] == mixed()["c"]).all()


def shards(folder, weight_map=None):
    t = mixed()
    write(folder / "s1.safetensors", {"a": t["a"], "b": t["b"]})
    write(folder / "s2.safetensors", {"c": t["c"]})
    weight_map = weight_map or {"a": "s1.safetensors", "b": "s1.safetensors", "c": "s2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return t


def test_b82_the_index_decides(tmp_path):
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


def test_a_name_given_twice(tmp_path):
    entry = '"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    raw = f"{{{entry}, {entry}}}".encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0" * 4)
    with pytest.raises(ValueError, match="'a' is given twice"):
        read_header(file)
