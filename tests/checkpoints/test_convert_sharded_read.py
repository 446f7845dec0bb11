"""Parts of a checkpoint: each process of a model over processes reads its own parts, and no more."""

import numpy as np
import pytest
from hf_folders import HF, write_hf

from convert import sharded_read, source
from convert.llama_weights import LLAMA, Part, from_hf_tensors, table
from specjax.models import llama, parallel
from specjax.models.config import from_hf
from specjax.models.quantized import map_with_path

BIASES = {**HF, "attention_bias": True, "mlp_bias": True}
TIED = {**HF, "tie_word_embeddings": True}


def cut(path, shape, count):
    """The parts of a leaf over so many devices, as slices."""
    axes = [i for i, name in enumerate(parallel.spec(path, "model")) if name]
    whole = tuple(slice(None) for _ in shape)
    if not axes:
        return [whole]
    size = shape[axes[0]] // count
    ranges = [slice(i * size, (i + 1) * size) for i in range(count)]
    return [(*whole[: axes[0]], one, *whole[axes[0] + 1 :]) for one in ranges]


@pytest.mark.parametrize("hf", [HF, BIASES, TIED], ids=["plain", "biases", "tied"])
def test_parts_together_are_the_leaf_and_each_reads_its_share(tmp_path, monkeypatch, hf):
    tensors, config = write_hf(tmp_path / "m", hf), from_hf(hf)
    expected = from_hf_tensors(config, tensors.items())
    entries, read = source.open_source(tmp_path / "m").entries, []
    real = sharded_read._slice
    monkeypatch.setattr(sharded_read, "_slice", lambda *args: read.append(real(*args)) or read[-1])
    places: dict[tuple, list[tuple[str, Part]]] = {}
    for name, part in table(config).items():
        places.setdefault(part.path, []).append((LLAMA.full_name(name), part))

    def check(path, leaf):
        pieces = cut(path, leaf.shape, 2)
        for index in pieces:
            read.clear()
            found = sharded_read.filled(entries, places[path], leaf.shape, index, np.dtype(np.float32))
            node = expected
            for key in path:
                node = node[key]
            np.testing.assert_array_equal(found, np.asarray(node)[index], err_msg=str(path))
            assert sum(one.size for one in read) == found.size == leaf.size // len(pieces)
        return len(pieces)

    counts = map_with_path(check, llama.structure(config)[1])
    assert counts["embed"] == 2 and counts["layers"]["0"]["mlp"]["down"]["weight"] == 2


def test_a_model_read_in_parts_is_the_model(tmp_path):
    """On a mesh of one device; over processes: tests/distributed. In other dtypes too."""
    write_hf(tmp_path / "m", TIED)
    opened = source.open_source(tmp_path / "m")
    found = opened.fill_parts(parallel.mesh(1), "bfloat16", "int8")
    expected = source.open_source(tmp_path / "m").fill("bfloat16", parallel.placement(opened.config, None, "int8"))
    np.testing.assert_array_equal(found["embed"].values, expected["embed"].values)
    np.testing.assert_array_equal(found["layers"]["1"]["mlp"]["gate_up"]["weight"].scale,
                                  expected["layers"]["1"]["mlp"]["gate_up"]["weight"].scale)  # fmt: skip


def test_faults_of_values_are_named(tmp_path):
    bad = np.full((272, 32), np.nan, np.float32)
    write_hf(tmp_path / "nan", HF, **{"model.embed_tokens.weight": bad})
    with pytest.raises(ValueError, match="not finite: model.embed_tokens.weight"):
        source.open_source(tmp_path / "nan").fill_parts(parallel.mesh(1))
    write_hf(tmp_path / "untied", TIED, **{"lm_head.weight": np.ones((272, 32), np.float32)})
    with pytest.raises(ValueError, match="contradictory: lm_head.weight differs"):
        source.open_source(tmp_path / "untied").fill_parts(parallel.mesh(1))
