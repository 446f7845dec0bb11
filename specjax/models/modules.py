"""Modules over plain parameter trees: what ``jax.jit`` sees is a nested dict of arrays, merged into a module inside."""

import dataclasses
from collections.abc import Mapping
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, Self

import jax
from flax import nnx

from specjax.decode import random


class Config:
    """What configurations of trained modules share: a JSON-ready dict and back. For frozen dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)


@lru_cache(maxsize=64)
def structure(cls: type, config: Any) -> tuple[nnx.GraphDef, dict]:
    """``cls(config)`` as a graph definition, and its parameters as shapes: nested dicts, list indices as strings."""
    # Shapes don't depend on keys. nnx.Rngs counts its draws, which under a trace takes time quadratic in the layers.
    one_key = SimpleNamespace(params=partial(jax.random.key, 0))
    abstract = nnx.eval_shape(lambda: cls(config, rngs=one_key))
    graphdef, state = nnx.split(abstract)
    return graphdef, _string_keys(nnx.to_pure_dict(state))


def merge(cls: type, config: Any, params: dict) -> Any:
    """The module over a parameter tree; call it inside ``jit``, where building it costs nothing at run time."""
    return nnx.merge(structure(cls, config)[0], _int_keys(params))


def init(cls: type, config: Any, seed: int) -> dict:
    """A parameter tree with the module's own random float32 weights."""
    return _string_keys(nnx.to_pure_dict(nnx.state(cls(config, rngs=nnx.Rngs(random.key(seed))))))


def _string_keys(tree):
    # JSON and orbax know only string keys, so the stored tree has no others.
    return {str(k): _string_keys(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def _int_keys(tree):
    if not isinstance(tree, dict):
        return tree
    return {int(k) if k.isdigit() else k: _int_keys(v) for k, v in tree.items()}
