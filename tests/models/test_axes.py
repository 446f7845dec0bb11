"""The axes of a mesh."""

import jax
import numpy as np

from specjax.models import axes, parallel


def test_the_last_axis_of_a_mesh_cuts_the_model_whatever_its_name():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    assert axes.parts(mesh) == 1 and axes.row_axis(mesh) is None
    assert parallel.cache_sharding(mesh).spec == jax.P(None, "data")
