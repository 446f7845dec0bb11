"""Where the tensors of a checkpoint go in the parameter tree."""

from typing import Any, NamedTuple

import numpy as np


class Part(NamedTuple):
    """The place of a source tensor: ``leaf.reshape(view)[indices].transpose(axes)``, of the tree's leaf at ``path``."""

    path: tuple[str, ...]  # the leaf's path in the tree
    shape: tuple[int, ...]  # the source tensor's shape
    view: tuple[int, ...]  # the shape in which the leaf is indexed
    indices: tuple[Any, ...] = ()  # the indices of the source tensor there; (): the whole leaf
    axes: tuple[int, ...] | None = None  # the order in which the source tensor has the axes; None: the leaf's own

    def of(self, leaf: np.ndarray) -> np.ndarray:
        """The source tensor's part of a contiguous leaf. It is a view, so writing to it writes to the leaf."""
        part = leaf.reshape(self.view)[self.indices]
        return part if self.axes is None else part.transpose(self.axes)


def whole(path: tuple[str, ...], *shape: int) -> Part:
    """The place of a tensor that is a whole leaf."""
    return Part(path, shape, shape)


class Layout(NamedTuple):
    """The tensors of one family's checkpoints."""

    table: dict[str, Part]  # the place of every tensor, by its name without the prefix
    prefix: str = "model."  # the beginning of names in checkpoints of whole models; the output head has none
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)  # ends of names that are skipped: they follow from the config

    def full_name(self, name: str) -> str:
        """The tensor's name in a checkpoint of a whole model, with the prefix."""
        return name if name.startswith("lm_head.") else self.prefix + name
