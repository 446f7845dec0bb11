"""Tensor parallelism: one model over the devices of a one-axis mesh, the loop and the drafters as they are.

Megatron's split (Shoeybi et al. 2019, section 3): query/key/value and gate/up products are cut by output, attention
and MLP outputs by input, so a layer sums across devices twice. Weights say how they are cut, and XLA's
partitioner does the rest but for looking embeddings up (``LM.embed``) and the attention kernel (``attention.attend``).
Each device holds its kv heads' cache, and everything outside the target is held by all devices alike.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.models import quantized
from specjax.models.config import LlamaConfig
from specjax.models.lm import LM


def mesh(count: int | None = None) -> Mesh:
    """The first ``count`` devices, or all, in a row.

    Raises:
      ValueError: fewer are there.
    """
    devices = jax.devices()
    count = len(devices) if count is None else count
    if not 1 <= count <= len(devices):
        raise ValueError(f"a mesh of {count} devices was asked for, and jax sees {len(devices)}: {devices}")
    return Mesh(np.array(devices[:count]), ("model",), axis_types=(AxisType.Auto,))


def check(config: LlamaConfig, mesh: Mesh) -> None:
    """Raises ValueError unless the mesh has one axis and all that is cut can be cut evenly over it."""
    if len(mesh.axis_names) != 1:
        raise ValueError(f"the mesh has axes {dict(mesh.shape)}, expected one: specjax.parallel.mesh(count) makes it")
    if mesh.axis_types != (AxisType.Auto,):  # jax.make_mesh gives Explicit axes unless told
        raise ValueError(f"the mesh's axis is {mesh.axis_types[0]}, expected Auto: specjax.parallel.mesh(count) has it")
    parts = ["num_key_value_heads", "intermediate_size", "hidden_size"]
    parts += [] if config.tie_word_embeddings else ["vocab_size"]
    uneven = [f"{name} = {getattr(config, name)}" for name in parts if getattr(config, name) % mesh.size]
    if uneven:
        raise ValueError(f"{mesh.size} devices can't share evenly {', '.join(uneven)}; take a divisor of each")


def spec(path: tuple[str, ...], axis: str) -> PartitionSpec:
    """How the leaf at ``path`` of the parameter tree is cut, as an unquantised array."""
    if path[0] == "embed":  # not by vocabulary: XLA fetches the whole of such a table to look one token up
        return PartitionSpec(None, axis)  # [V, H]
    if path[0] == "lm_head" or "qkv" in path:
        return PartitionSpec(axis)  # [V, H] by token; [kv_heads, width(, H)] by kv head
    if "gate_up" in path:
        return PartitionSpec(None, axis)  # [2, F(, H)]
    if path[-1] == "weight" and path[-2] in ("o", "down"):
        return PartitionSpec(None, axis)  # [H, in]
    return PartitionSpec()


def sharding(path: tuple[str, ...], leaf: Any, mesh: Mesh) -> Any:
    """Where the leaf at ``path`` goes: a NamedSharding, or a Quantized of two as the leaf is."""
    cut = spec(path, mesh.axis_names[0])
    return jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec(*cut[: x.ndim])), leaf)  # scales lack the last axis


def cache_sharding(mesh: Mesh | None) -> NamedSharding | None:
    """Of a cut model's keys and values [B, kv_heads, S, head_dim]."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(None, mesh.axis_names[0]))


def placement(config: LlamaConfig, mesh: Mesh | None = None, quantize: str | None = None) -> Callable:
    """The function (path, host array) -> leaf where it stays: each device gets its own part, and never more.

    Raises:
      ValueError: as :func:`check`, at once.
    """
    if mesh is not None:
        check(config, mesh)

    def put(path, leaf):
        return jax.device_put(leaf, None if mesh is None else sharding(path, leaf, mesh))

    def place(path, leaf):
        leaf = put(path, leaf)
        if quantize is not None and quantized.is_matrix(config, path):
            leaf = put(path, quantized.quantize(leaf, quantize))
        return jax.block_until_ready(leaf)  # else the next tensor is read while this one's original is still held

    return place


def shard(lm: LM, mesh: Mesh) -> LM:
    """A loaded model cut over the mesh: every device holds 1 / mesh.size of each matrix and of the cache's heads.

    ``specjax.load(name, mesh=mesh)`` does the same without holding the model on one device first.

    Raises:
      ValueError: the mesh doesn't suit the model's shape; the message has the numbers.
    """
    params = quantized.map_with_path(placement(lm.config, mesh), lm.params)
    return dataclasses.replace(lm, params=params, cache_sharding=cache_sharding(mesh))


def replicate(lm: LM, mesh: Mesh | None) -> LM:
    """The whole model on every device of the mesh: for a draft model beside a target that is cut, or (None) isn't."""
    if mesh is None:
        return lm
    whole = NamedSharding(mesh, PartitionSpec())
    return dataclasses.replace(lm, params=jax.device_put(lm.params, whole), cache_sharding=whole)
