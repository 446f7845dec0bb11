"""Where the state of an engine lies. Every program leaves the state there.

A program is compiled once more for arrays that lie differently, and JAX chooses for each program where its results lie.
On a mesh, XLA's partitioner may cut the same array in one program and not in another one. On one device, the results of
arrays that were bound to the device, such as loaded weights, are bound too, and all others are not.
"""

from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from specjax.decode import rows
from specjax.models import axes
from specjax.models.cache import KVCache
from specjax.models.model import Model


class Layout(NamedTuple):
    """The shardings of a state. Equal layouts have equal hashes."""

    # The sharding of every array that each device holds whole.
    whole: Sharding
    # The shardings of the state's leaves, in the order of its tree.
    leaves: tuple[Sharding, ...]
    # The structure of the state's tree.
    tree: Any

    @property
    def state(self) -> Any:
        """The tree of shardings of the state."""
        return jax.tree.unflatten(self.tree, self.leaves)


def layout_of(state: Any, target: Model) -> Layout:
    """Pools lie as their caches say. Of all else each row is whole on every device that works on the row.

    Args:
      state: the state, or its shapes.
      target: the model that the engine decodes with.
    """
    whole = _whole(target)
    row = whole if target.mesh is None else axes.of_rows(target.mesh)

    def of_cache(cache: KVCache) -> KVCache:
        def of_pool(_: Any) -> Sharding:
            return cache.sharding or row

        bare = jax.tree.map(lambda _: row, rows.without_pools(cache))
        return bare.replace(keys=jax.tree.map(of_pool, cache.keys), values=jax.tree.map(of_pool, cache.values))

    leaves, tree = jax.tree.flatten(rows.over_caches(of_cache, lambda _: row, state))
    return Layout(whole, tuple(leaves), tree)


def _whole(target: Model) -> Sharding:
    """The sharding of an array that is whole on every device of the target."""
    if target.mesh is not None:
        return axes.whole(target.mesh)
    [device] = jax.tree.leaves(target)[0].devices()
    return SingleDeviceSharding(device)
