"""The axes of a mesh: the last one cuts weights and kv heads; an axis "data" before it, if there is one, cuts rows.

Along "data" the mesh falls into *parts*. Each part holds a whole copy of the model, and works on rows of its own:

    specjax.parallel.mesh(4, data=2)      model ->
                                   data   part 0:  device 0   device 1      rows 0 to B/2 - 1
                                    |     part 1:  device 2   device 3      rows B/2 to B - 1
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

DATA = "data"


def row_axis(mesh: Mesh | AbstractMesh) -> str | None:
    """The name of the axis for rows; None: the mesh has none. The last axis cuts the model, whatever its name."""
    return DATA if DATA in mesh.axis_names[:-1] else None


def parts(mesh: Mesh | AbstractMesh | None) -> int:
    """How many parts share the rows; 1 if there is no mesh or no such axis."""
    return 1 if mesh is None or row_axis(mesh) is None else mesh.shape[DATA]


def whole(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def of_rows(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays [B, ...]: each row is whole on every device of its part."""
    return whole(mesh) if row_axis(mesh) is None else NamedSharding(mesh, PartitionSpec(DATA))


def fitted(sharding: NamedSharding, rows: int) -> NamedSharding:
    """The sharding for arrays of so many rows. If the parts can't share them evenly, each part has all rows."""
    axes = sharding.spec[:1]
    if axes in ((), (None,)) or rows % math.prod(sharding.mesh.shape[axis] for axis in axes) == 0:
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:]))


def by_part(call: Callable, mesh: Mesh | None, rows: int) -> Callable:
    """``call``, a function of arrays of B = ``rows`` rows, made in each part for the part's rows.

    This is for what XLA's partitioner doesn't cut, such as ``lax.top_k``: every part would get the rows of all parts.
    """
    if parts(mesh) == 1 or rows % parts(mesh):
        return call
    return jax.shard_map(call, mesh=mesh, in_specs=PartitionSpec(DATA), out_specs=PartitionSpec(DATA))


def on_host(tree: Any, mesh: Mesh | None) -> Any:
    """The arrays [B, ...] as NumPy's. Rows that lie in other processes are fetched from there."""
    if parts(mesh) > 1 and any(not x.is_fully_addressable for x in jax.tree.leaves(tree)):
        tree = _made_whole(tree, whole(mesh))  # type: ignore[arg-type]
    return jax.device_get(tree)


@partial(jax.jit, static_argnames="sharding")
def _made_whole(tree: Any, sharding: NamedSharding) -> Any:
    return jax.lax.with_sharding_constraint(tree, sharding)
