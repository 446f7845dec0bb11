"""Files of torch.save, read without torch: exact values, and nothing in them is run."""

import collections
import io
import pickle
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from eagle_heads import TARGET, generated, random_head
from published_heads import MEDUSA, publish_eagle, publish_medusa
from safetensors.numpy import load_file

from convert import torch_file
from specjax.checkpoints import trained_drafters as files

torch = pytest.importorskip("torch")
KINDS = ("float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool").split()


def tensors():
    rng = torch.Generator().manual_seed(0)
    each = {kind: (10 * torch.randn(3, 5, generator=rng)).to(getattr(torch, kind)) for kind in KINDS}
    base = torch.arange(24.0).reshape(4, 6)
    views = {"turned": base.t(), "part": base[1:3, ::2], "last": base[3], "scalar": torch.tensor(2.5)}
    return {**each, **views, "empty": torch.zeros(0, 4), "parameter": torch.nn.Parameter(torch.ones(2))}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_every_tensor_is_bit_exact(tmp_path, kind, protocol):
    torch.save(kind(tensors()), tmp_path / "x.bin", pickle_protocol=protocol)
    read = dict(torch_file.read(tmp_path / "x.bin"))
    assert read.keys() == tensors().keys()
    for name, tensor in tensors().items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert str(read[name].dtype) == dtype and read[name].shape == tuple(tensor.shape), name
        same = read[name].astype(np.float64) == tensor.detach().double().numpy()
        assert same.all(), name


def test_a_state_dict_of_a_module_is_read(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2))
    torch.save(module.state_dict(), tmp_path / "x.pt")  # it carries an attribute, _metadata
    assert (dict(torch_file.read(tmp_path / "x.pt"))["0.weight"] == module[0].weight.detach().numpy()).all()


class Evil:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("evil", [
    Evil(exec, "raise SystemExit('ran')"), Evil(eval, "1"), Evil(getattr, "a", "upper"), Evil(open, "x", "w"),
    Evil(subprocess.Popen, ["true"]), Evil(__import__, "os"), Evil(torch.load, "x"), Evil(np.load, "x"),
], ids=lambda e: e.call.__name__)  # fmt: skip
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_calls_anything_else_is_refused_and_runs_nothing(tmp_path, monkeypatch, evil, protocol):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("x.bin", "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"w": evil}, protocol=protocol))
    with pytest.raises(ValueError, match="x.bin can't be read .* asks for .*, which is no part of a tensor"):
        list(torch_file.read(tmp_path / "x.bin"))
    assert [p.name for p in tmp_path.iterdir()] == ["x.bin"]


def test_a_pickle_cannot_change_the_reader(tmp_path):
    """The opcode BUILD sets attributes on whatever is on the stack."""
    for name in ("torch._utils\n_rebuild_tensor_v2", "torch._utils\n_rebuild_parameter", "collections\nOrderedDict"):
        for state in (b"}\x8c\x01aK\x01s", b"}N}\x8c\x01aK\x01s\x86"[1:]):
            with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
                archive.writestr("x/data.pkl", b"\x80\x04c" + name.encode() + b"\n" + state + b"b.")
            with pytest.raises(ValueError, match="x.bin can't be read"):
                list(torch_file.read(tmp_path / "x.bin"))
    assert not any(hasattr(found, "a") for found in torch_file._ALLOWED.values())


def rewritten(path, change):
    """The archive with the changes of ``change(name, bytes)``."""
    old = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    with zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


@pytest.mark.parametrize("save, change, words", [
    ([torch.ones(2)], None, "holds a list, expected a dict of tensors"),
    ({"a": {"b": torch.ones(2)}}, None, "the entry 'a' is a dict, expected a name and a tensor"),
    ({"epoch": 3}, None, "the entry 'epoch' is a int"),
    ({0: torch.ones(2)}, None, "the entry '0'"),
    ({"a": torch.ones(2)}, lambda name, raw: raw[:-1] if "/data/" in name else raw, "storage of 2 "),
    ({"a": torch.ones(1).expand(10**9, 10**9)}, None, "reaches element 0 of a storage of 1"),
    ({"a": torch.ones(2)}, lambda name, raw: b"big" if name.endswith("byteorder") else raw, "big-endian"),
    ({"a": torch.ones(7, 2)}, lambda name, raw: raw.replace(b"K\x07K\x02\x86", b"K\x63K\x02\x86"), "element 197"),
    ({"a": torch.ones(2, dtype=torch.complex64)}, None, "asks for torch.ComplexFloatStorage"),
    ({"a": torch.ones(2).to(torch.float8_e4m3fn)}, None, "asks for torch"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_other_contents_are_refused_by_name(tmp_path, save, change, words):
    torch.save(save, tmp_path / "x.bin")
    if change is not None:
        rewritten(tmp_path / "x.bin", change)
    with pytest.raises(ValueError, match=f"x.bin can't be read .*{words}"):
        list(torch_file.read(tmp_path / "x.bin"))


def test_files_that_are_no_archive_are_refused(tmp_path):
    path = tmp_path / "x.bin"
    torch.save(tensors(), path)
    raw = path.read_bytes()
    for broken in (b"", b"hello", raw[:-100], raw[: len(raw) // 2]):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="x.bin can't be read as a file of tensors that torch.save wrote"):
            list(torch_file.read(path))


def test_the_old_format_is_refused_with_a_command_that_works(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="x.pt has the format of torch before 1.6; write .* once") as error:
        list(torch_file.read(path))
    code = str(error.value).split('-c "')[1].removesuffix('"')
    subprocess.run([sys.executable, "-c", code], check=True)
    assert dict(torch_file.read(path))["a"].tolist() == [1, 1]


def as_torch(folder, old, new, dtype=torch.float32):
    arrays = load_file(folder / old)
    (folder / old).unlink()
    each = {name: torch.from_numpy(array) for name, array in arrays.items()}
    torch.save({n: t.to(dtype) if t.is_floating_point() else t for n, t in each.items()}, folder / new)


@pytest.mark.slow
@pytest.mark.parametrize("new", ["pytorch_model.bin", "model.pt"])
def test_an_eagle_head_of_torch_drafts_as_it_did(tmp_path, new):
    drafter = random_head()
    folder = publish_eagle(tmp_path / "head", drafter, TARGET)
    as_torch(folder, "model.safetensors", new)
    (folder / "training_args.bin").write_bytes(b"x")
    a, b = generated(drafter), generated(files.load(folder, TARGET))
    assert a.tokens == b.tokens and a.metrics == b.metrics


def test_medusa_heads_of_torch_have_their_weights(tmp_path):
    folder = publish_medusa(tmp_path / "heads")
    as_torch(folder, "medusa_lm_head.safetensors", "medusa_lm_head.pt", torch.bfloat16)
    back, table = files.load(folder, TARGET), MEDUSA.params["lm_head"]
    assert (back.params["lm_head"] == table.astype("bfloat16").astype("float32")).all()


def test_a_head_in_two_files_or_none_is_refused(tmp_path):
    folder = publish_medusa(tmp_path / "heads")
    as_torch(folder, "medusa_lm_head.safetensors", "a.pt")
    (folder / "b.bin").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match="found a.pt, b.bin; keep the one that holds the head"):
        files.load(folder, TARGET)
    (folder / "a.pt").unlink(), (folder / "b.bin").unlink()
    with pytest.raises(FileNotFoundError, match="should hold medusa_lm_head.safetensors.*or one .bin or .pt"):
        files.load(folder, TARGET)
