"""A model with weights on its sublayers: how any set of left-out sublayers becomes one program."""

import dataclasses

import jax

from specjax.models.lm import LM


def weighted(lm: LM, sublayers: jax.Array) -> LM:
    """The model with the contributions of each layer's attention and MLP multiplied by f32[layers, 2].

    A factor of 0 leaves a sublayer out. Every set of sublayers is then the same program, at the cost of the whole
    model; the argument ``run`` of a call saves that cost. Not for quantised weights.
    """

    def scaled(linear: dict, factor: jax.Array) -> dict:
        return {name: leaf * factor.astype(leaf.dtype) for name, leaf in linear.items()}

    layers = {}
    for name, layer in lm.params["layers"].items():
        attention, mlp = sublayers[int(name)]
        layers[name] = {
            **layer,
            "attention": {**layer["attention"], "o": scaled(layer["attention"]["o"], attention)},
            "mlp": {**layer["mlp"], "down": scaled(layer["mlp"]["down"], mlp)},
        }
    return dataclasses.replace(lm, params={**lm.params, "layers": layers})
