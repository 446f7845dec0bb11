"""Tensor parallelism: one model over the devices of a mesh. The loop and the drafters don't change.

Weights are cut as in Megatron (Shoeybi et al. 2019, section 3). The query/key/value and gate/up products are cut by
output. The output products of attention and MLP are cut by input, so each layer sums across devices twice. Each weight
has a sharding that says how it is cut. XLA's partitioner does the rest, with two exceptions: the lookup of embeddings
(``LM.embed``) and attention (``attention.attend``). Each device holds the cache of its own kv heads. Everything outside
the target is held whole by every device. A mesh may also have parts that share the rows (``models/axes.py``).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.decode.numeric import is_int
from specjax.models import axes, quantized
from specjax.models.axes import DATA
from specjax.models.configs import ModelConfig
from specjax.models.lm import LM


def mesh(count: int | None = None, data: int = 1) -> Mesh:
    """A mesh of the first ``count`` devices.

    Args:
      count: the number of devices. None: all devices.
      data: the number of parts of ``count / data`` devices that share the rows. Each part has the whole model, cut over
        its devices. Above 1 the mesh has the axes ("data", "model"), else the one axis "model".

    Raises:
      ValueError: there are fewer devices, or their number is no multiple of ``data``.
    """
    devices = jax.devices()
    count = len(devices) if count is None else count
    if not 1 <= count <= len(devices):
        raise ValueError(f"a mesh of {count} devices was asked for, and jax sees {len(devices)}: {devices}")
    if not (is_int(data) and data >= 1 and count % data == 0):
        raise ValueError(f"data must be a divisor of the {count} devices of the mesh, got {data!r}")
    found = np.array(devices[:count])
    if data == 1:
        return Mesh(found, ("model",), axis_types=(AxisType.Auto,))
    return Mesh(found.reshape(data, -1), (DATA, "model"), axis_types=(AxisType.Auto,) * 2)


def spans_processes(mesh: Mesh) -> bool:
    """Whether some of the mesh's devices belong to another process."""
    return any(device.process_index != jax.process_index() for device in mesh.devices.flat)


def check(config: ModelConfig, mesh: Mesh) -> None:
    """Raises ValueError unless the mesh's axes are known and every size that is cut is a multiple of its devices."""
    if mesh.axis_names[:-1] not in ((), (DATA,)):
        raise ValueError(
            f'the mesh has axes {dict(mesh.shape)}, expected one, or "data" and one more; use '
            "specjax.parallel.mesh(count, data)"
        )
    if set(mesh.axis_types) != {AxisType.Auto}:  # jax.make_mesh makes Explicit axes by default
        raise ValueError(f"the mesh's axes are {mesh.axis_types}, expected Auto; use specjax.parallel.mesh(count)")
    if config.start_ids and axes.parts(mesh) > 1:
        raise ValueError(
            f"a model with an encoder can't share rows over the parts of a mesh, got {dict(mesh.shape)}; use "
            "specjax.parallel.mesh(count), without data"
        )
    size = mesh.shape[mesh.axis_names[-1]]
    cut = ["num_key_value_heads", "intermediate_size", "hidden_size"]
    cut += [] if config.tie_word_embeddings else ["vocab_size"]
    uneven = [f"{name} = {getattr(config, name)}" for name in cut if getattr(config, name) % size]
    if uneven:
        raise ValueError(f"{size} devices can't share evenly {', '.join(uneven)}; take a divisor of each")


def spec(path: tuple[str, ...], axis: str) -> PartitionSpec:
    """How the leaf at ``path`` of the parameter tree is cut over the mesh's ``axis``, as an unquantised array."""
    if path[0] == "embed":  # not cut by vocabulary, because XLA would then fetch the whole table to look up one token
        return PartitionSpec(None, axis)  # [V, H]
    if path[0] == "lm_head" or {"qkv", "q", "kv"} & set(path):
        return PartitionSpec(axis)  # [V, H] is cut by token; [kv_heads, width(, H)] by kv head
    if path[-1] in ("weight", "bias") and path[-2] == "up":
        return PartitionSpec(axis)  # [F(, H)]
    if "gate_up" in path:
        return PartitionSpec(None, axis)  # [2, F(, H)]
    if path[-1] == "weight" and path[-2] in ("o", "down"):
        return PartitionSpec(None, axis)  # [H, in]
    return PartitionSpec()


def sharding(path: tuple[str, ...], leaf: Any, mesh: Mesh) -> Any:
    """The sharding of the leaf at ``path``: a NamedSharding, or for a Quantized leaf a Quantized of two."""
    cut = spec(path, mesh.axis_names[-1])
    # Scales have one axis less than codes: the last.
    return jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec(*cut[: x.ndim])), leaf)


def cache_sharding(mesh: Mesh | None) -> NamedSharding | None:
    """The sharding of a cut model's keys and values [B, kv_heads, S, head_dim]: by kv head, and by row over "data".

    None for no mesh.
    """
    if mesh is None:
        return None
    return NamedSharding(mesh, PartitionSpec(axes.row_axis(mesh), mesh.axis_names[-1]))


def put(leaf: Any, where: Any) -> Any:
    """The leaf on its devices. ``where`` is a sharding, of a Quantized a Quantized of two; None: the default device.

    Of devices that belong to other processes, each process fills its own. Every process must have the same leaf.
    """
    if isinstance(where, NamedSharding) and not where.is_fully_addressable and not _placed(leaf, where):
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])
    if quantized.is_quantized(where):
        return quantized.Quantized(put(leaf.values, where.values), put(leaf.scale, where.scale))
    return jax.device_put(leaf, where)


def _placed(leaf: Any, where: NamedSharding) -> bool:
    """Whether an array lies on the devices of a sharding already, in whatever parts."""
    return isinstance(leaf, jax.Array) and leaf.sharding.device_set == where.device_set


def placement(config: ModelConfig, mesh: Mesh | None = None, quantize: str | None = None) -> Callable:
    """A function (path, host array) -> leaf that puts each weight on its devices. A device gets only its own part.

    Args:
      config: the model's shape.
      mesh: the devices that share the model; None: the default device.
      quantize: "int8" or "fp8" quantises matrices on their devices; None: nothing is quantised.

    Raises:
      ValueError: as :func:`check`, before any weight is placed.
    """
    if mesh is not None:
        check(config, mesh)

    def place(path, leaf):
        leaf = put(leaf, None if mesh is None else sharding(path, leaf, mesh))
        if quantize is not None and quantized.is_matrix(config, path):
            leaf = quantized.quantize(leaf, quantize)
            leaf = put(leaf, None if mesh is None else sharding(path, leaf, mesh))
        # Without the wait, the next tensor would be read while this one's original is still held.
        return jax.block_until_ready(leaf)

    return place


def shard(lm: LM, mesh: Mesh) -> LM:
    """The loaded model, cut over the mesh. A part of n devices holds 1 / n of each matrix and of the heads on each.

    ``specjax.load(name, mesh=mesh)`` does the same without first holding the whole model on one device.

    Raises:
      ValueError: the mesh doesn't suit the model's shape. The message has the numbers.
    """
    params = quantized.map_with_path(placement(lm.config, mesh), lm.params)
    return dataclasses.replace(lm, params=params, cache_sharding=cache_sharding(mesh))


def replicate(lm: LM, mesh: Mesh | None) -> LM:
    """The whole model on every device of the mesh, for a draft model beside a cut target. None: the model as it is."""
    if mesh is None:
        return lm
    return dataclasses.replace(lm, params=everywhere(lm.params, mesh), cache_sharding=axes.of_rows(mesh))


def everywhere(tree: Any, mesh: Mesh | None) -> Any:
    """The tree with each array, and each model, whole on every device of the mesh: a drafter beside a cut target.

    What lies on the mesh already stays as it is. None: the tree as it is.
    """
    if mesh is None:
        return tree
    whole = axes.whole(mesh)

    def beside(part: Any) -> Any:
        if isinstance(part, LM):
            return part if part.mesh is not None else replicate(part, mesh)
        return part if _placed(part, whole) else put(part, whole)

    return jax.tree.map(beside, tree, is_leaf=lambda part: isinstance(part, LM))
