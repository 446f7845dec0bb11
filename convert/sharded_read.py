"""Reads of a safetensors checkpoint the parts alone that this process's devices hold, for a model over processes.

A leaf of the parameter tree is cut along one axis at most. Of each tensor that belongs to the leaf, only what lies in
the part is read.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import safe_open

from convert import llama_weights
from convert.layout import Part
from convert.safetensors import Entry
from specjax.models import families, parallel, quantized
from specjax.models.config import LlamaConfig


def read(
    config: LlamaConfig, entries: dict[str, Entry], dtype: Any, mesh: Mesh, quantize: str | None = None
) -> dict[str, Any]:
    """The parameter tree, cut over a mesh. Each process reads its own parts.

    Args:
      config: the model's shape.
      entries: the tensors by their Hugging Face names, which may lack the prefix ``model.``. Names and shapes have been
        checked.
      dtype: the dtype of every leaf.
      mesh: the devices that share the model.
      quantize: as in :func:`specjax.load`.

    Raises:
      ValueError: as :func:`specjax.parallel.check`; or a part holds values that are not finite in ``dtype``, or a tied
        output head differs from the embedding.
    """
    parallel.check(config, mesh)
    sources: dict[tuple[str, ...], list[tuple[str, Part]]] = {}
    layout = llama_weights.layout(config)
    for name, part in layout.table.items():
        full = layout.full_name(name)
        sources.setdefault(part.path, []).append((full if full in entries else name, part))
    if config.tie_word_embeddings and "lm_head.weight" in entries:
        sources["embed",].append(("lm_head.weight", sources["embed",][0][1]))

    def leaf(path: tuple[str, ...], shape: Any) -> Any:
        where = parallel.sharding(path, shape, mesh)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return filled(entries, sources[path], shape.shape, index, jnp.dtype(dtype))

        found = jax.make_array_from_callback(shape.shape, where, part)
        if quantize is not None and quantized.is_matrix(config, path):
            found = quantized.quantize(found, quantize)
            found = parallel.put(found, parallel.sharding(path, found, mesh))
        return jax.block_until_ready(found)

    return quantized.map_with_path(leaf, families.structure(config)[1])


def filled(
    entries: dict[str, Entry],
    sources: Sequence[tuple[str, Part]],
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    dtype: Any,
) -> np.ndarray:
    """One part of a leaf.

    Args:
      entries: the tensors by name.
      sources: the names of the tensors of the leaf, and their places in the leaf.
      shape: the shape of the whole leaf.
      index: the part, a slice for each axis; at most one of them leaves something out.
      dtype: the leaf's dtype.

    Raises:
      ValueError: values are not finite in ``dtype``, or two tensors for one place differ.
    """
    ends = [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
    axis = next((i for i, (end, size) in enumerate(zip(ends, shape, strict=True)) if end != (0, size)), 0)
    low, high = ends[axis]
    found = llama_weights.empty((*shape[:axis], high - low, *shape[axis + 1 :]), dtype)
    written: list[Part] = []
    for name, part in sources:
        target = part._replace(view=(*part.view[:axis], high - low, *part.view[axis + 1 :])).of(found)
        with np.errstate(over="ignore"):  # an overflow gives infinity, which is reported below
            values = _slice(name, entries[name], part, axis, low, high).reshape(target.shape).astype(dtype)
        if not np.isfinite(values).all():
            raise ValueError(f"not finite: {name} holds NaN or infinity as {dtype}")
        if part in written and not np.array_equal(values, target):
            raise ValueError(
                f"contradictory: {name} differs from the embedding, but the config says tie_word_embeddings = true; "
                "set it to false, or remove that tensor"
            )
        target[...] = values
        written.append(part)
    return found


def _slice(name: str, entry: Entry, part: Part, axis: int, low: int, high: int) -> np.ndarray:
    """The part of a tensor that belongs to ``low <= i < high`` along the leaf's ``axis``."""
    rows = entry.shape[0] // part.view[axis]  # of the tensor for each i, if the leaf is cut by rows
    cut_by_row = axis == sum(isinstance(one, int) for one in part.indices[:axis])
    with safe_open(entry.file, "np") as file:
        tensor = file.get_slice(name)
        return tensor[low * rows : high * rows] if cut_by_row else tensor[:, low:high]
