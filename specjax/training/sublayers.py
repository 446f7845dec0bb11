"""A model with a factor on each sublayer, so that one program can leave out any set of sublayers."""

import dataclasses

import jax

from specjax.models.lm import LM


def weighted(lm: LM, sublayers: jax.Array) -> LM:
    """The model with each layer's attention and MLP outputs multiplied by factors.

    A factor of 0 leaves a sublayer out. All sets of sublayers share one program, which costs as much as the whole
    model. The argument ``run`` of a model call saves the cost of sublayers, with one program for each set. Quantised
    weights can't be scaled.

    Args:
      lm: the model.
      sublayers: f32[layers, 2], the factors of each layer's attention and MLP.
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
