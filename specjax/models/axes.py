"""The axes of a mesh: the last one cuts weights and kv heads; an axis "data" before it, if there is one, cuts rows."""

from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATA, MODEL = "data", "model"


def of_rows(mesh: Mesh | None) -> NamedSharding | None:
    """The sharding of arrays [B, ...]: each row is whole on every device that works on it. None for no mesh."""
    if mesh is None:
        return None
    return NamedSharding(mesh, PartitionSpec(DATA) if DATA in mesh.axis_names else PartitionSpec())
