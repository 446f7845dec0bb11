"""Modules with plain parameter trees. jit gets a nested dict of arrays, and makes a module of the dict inside."""

import dataclasses
from collections.abc import Mapping
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, Self

import jax
from flax import nnx

from specjax.decode import random


class Config:
    """Base of the configurations of trained modules, which are frozen dataclasses: to a dict and back."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; :meth:`from_dict` is its inverse."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`."""
        return cls(**data)


@lru_cache(maxsize=64)
def structure(cls: type, config: Any) -> tuple[nnx.GraphDef, dict]:
    """The graph definition of ``cls(config)``, and its parameter tree with shapes as leaves.

    The tree is nested dicts with strings as keys; the keys of a list are its indices, as strings.
    """
    # One key serves all draws, because shapes don't depend on keys. nnx.Rngs would count its draws, and under a trace
    # the counting takes time quadratic in the number of layers.
    one_key = SimpleNamespace(params=partial(jax.random.key, 0))
    abstract = nnx.eval_shape(lambda: cls(config, rngs=one_key))
    graphdef, state = nnx.split(abstract)
    return graphdef, _string_keys(nnx.to_pure_dict(state))


def merge(cls: type, config: Any, params: dict) -> Any:
    """The module with the weights of a parameter tree. Inside ``jit`` the call costs nothing at run time."""
    return nnx.merge(structure(cls, config)[0], _int_keys(params))


def init(cls: type, config: Any, seed: int) -> dict:
    """The parameter tree of a new module: float32 weights, drawn at random as the module says."""
    return _string_keys(nnx.to_pure_dict(nnx.state(cls(config, rngs=nnx.Rngs(random.key(seed))))))


def _string_keys(tree):
    # JSON and orbax allow only strings as keys, so the parameter tree has only strings.
    return {str(k): _string_keys(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def _int_keys(tree):
    if not isinstance(tree, dict):
        return tree
    return {int(k) if k.isdigit() else k: _int_keys(v) for k, v in tree.items()}
