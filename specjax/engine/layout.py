"""How the state of an engine lies on a mesh. Every program leaves the state so.

XLA's partitioner chooses the sharding of a result for which none is named, and may choose another one in each program.
The next program would then be compiled once more, for a state that lies differently.
"""

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.decode import rows
from specjax.models.cache import KVCache


class Layout(NamedTuple):
    """The shardings of a state. Equal layouts have equal hashes."""

    # The sharding of every array that each device holds whole.
    whole: NamedSharding
    # The shardings of the state's leaves, in the order of its tree.
    leaves: tuple[NamedSharding, ...]
    # The structure of the state's tree.
    tree: Any

    @property
    def state(self) -> Any:
        """The tree of shardings of the state."""
        return jax.tree.unflatten(self.tree, self.leaves)


def layout_of(state: Any, mesh: Mesh) -> Layout:
    """Pools lie as their caches say, and every device holds all else whole.

    Args:
      state: the state, or its shapes.
      mesh: the target's mesh.
    """
    whole = NamedSharding(mesh, PartitionSpec())

    def of_cache(cache: KVCache) -> KVCache:
        def of_pool(_: Any) -> NamedSharding:
            return cache.sharding or whole

        bare = jax.tree.map(lambda _: whole, rows.without_pools(cache))
        return bare.replace(keys=jax.tree.map(of_pool, cache.keys), values=jax.tree.map(of_pool, cache.values))

    leaves, tree = jax.tree.flatten(rows.over_caches(of_cache, lambda _: whole, state))
    return Layout(whole, tuple(leaves), tree)
