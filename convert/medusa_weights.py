"""Reads published Medusa heads: ``config.json`` and the tensors of ``medusa_lm_head``, by a closed table of names.

The residual blocks of head i are ``i.0`` to ``i.L-1``, and its own output head is ``i.L``.
"""

from pathlib import Path

import jax.numpy as jnp

from convert.head_tensors import open_folder
from convert.llama_weights import Filler, Part, Sheet, whole
from specjax.checkpoints.json_file import read_json
from specjax.drafters.medusa import Medusa
from specjax.models import config_values as values
from specjax.models import modules
from specjax.models.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig
from specjax.models.lm import LM

FILE = "medusa_lm_head.safetensors"


def table(config: MedusaHeadsConfig) -> dict[str, Part]:
    """The place of every tensor in the heads' tree, by the tensor's name."""
    size, vocab, last = config.hidden_size, config.vocab_size, config.num_layers
    parts = {}
    for i in range(config.num_heads):
        for j in range(last):
            path = ("heads", str(i), str(j))
            parts[f"{i}.{j}.linear.weight"] = whole((*path, "weight"), size, size)
            parts[f"{i}.{j}.linear.bias"] = whole((*path, "bias"), size)
        parts[f"{i}.{last}.weight"] = Part(("lm_head",), (vocab, size), (config.num_heads, vocab, size), (i,))
    return parts


def load(folder: str | Path, target: LM) -> Medusa:
    """The drafter of published heads, in the target's dtype.

    Args:
      folder: has ``config.json`` (``medusa_num_heads``, ``medusa_num_layers``) and the heads' tensors. These are in
        ``medusa_lm_head.safetensors``, in other safetensors, or in a file of ``torch.save``.
      target: the model that the heads were trained for.

    Raises:
      FileNotFoundError: the folder has no such files.
      ValueError: the config can't be used, or tensors are unknown, missing or misshapen. One error lists all of these.
    """
    folder = Path(folder)
    config = read_config(folder / "config.json", target)
    shapes = modules.structure(MedusaHeads, config)[1]
    filler = Filler(Sheet(table(config), name_of=str), shapes, target.dtype, lambda path, leaf: jnp.asarray(leaf))
    for name, array in open_folder(folder, FILE):
        filler.take(name.removeprefix("medusa_head."), array)
    return Medusa(config, filler.finish(), None)


def read_config(path: Path, target: LM) -> MedusaHeadsConfig:
    """The heads' configuration, from ``config.json``. Raises as :func:`load`.

    If the file doesn't say how many residual blocks a head has, a head has one.
    """
    hf, c = read_json(path), target.config
    problems = values.problems(hf, {key: values.COUNT for key in ("medusa_num_heads", "medusa_num_layers")})
    if hf.get("medusa_num_heads") is None:
        problems.append("medusa_num_heads is missing")
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}")
    layers = hf.get("medusa_num_layers")
    return MedusaHeadsConfig(c.hidden_size, c.vocab_size, hf["medusa_num_heads"], 1 if layers is None else layers, True)
