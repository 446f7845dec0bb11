"""Reads published DFlash heads: a folder of ``config.json`` and tensors, by a closed table of names.

The config is that of a Qwen 3 model with as many layers as the head. In addition ``block_size`` gives the tokens of a
block, and ``dflash_config`` the token that masks and ``target_layer_ids``: the head reads the target's hidden states
after these layers, counted from 0. The head has neither an embedding nor an output head; it uses the target's.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from convert.head_tensors import open_folder
from convert.llama_weights import Filler, Part, Sheet, norm, sublayers, whole
from specjax.checkpoints.json_file import read_json
from specjax.drafters.dflash import DFlash
from specjax.models import config_values as values
from specjax.models import modules
from specjax.models.config import from_hf
from specjax.models.heads.dflash_head import DFlashHead, DFlashHeadConfig
from specjax.models.lm import LM

KEY = "dflash_config"  # only the config.json of a DFlash head has this key
_HEAD_ONLY = {"block_size": values.COUNT, "num_target_layers": values.COUNT, KEY: values.OBJECT}
# The keys of dflash_config that are read, and those of other trainers that must be switched off: other masks, other
# orders of the block, other networks.
_READ = ("mask_token_id", "target_layer_ids", "num_target_layers")
_OFF = ("causal", "use_swa", "attention_sink_bias", "sample_from_anchor", "shift_label", "pure_draft_prefix_len")


def table(config: DFlashHeadConfig) -> dict[str, Part]:
    """The place of every tensor in the head's tree, by the tensor's name."""
    c, size = config.layer, config.layer.hidden_size
    parts = {
        "fc.weight": whole(("fuse", "weight"), size, len(config.taps) * size),
        "hidden_norm.weight": norm("hidden_norm", size),
        "norm.weight": norm("norm", size),
    }
    for i in range(c.num_hidden_layers):
        name, path = f"layers.{i}", ("layers", str(i))
        parts[f"{name}.input_layernorm.weight"] = whole((*path, "attention_norm", "weight"), size)
        parts[f"{name}.post_attention_layernorm.weight"] = whole((*path, "mlp_norm", "weight"), size)
        parts |= sublayers(c, name, path, size)
    return parts


def load(folder: str | Path, target: LM) -> DFlash:
    """The drafter of a published head, in the target's dtype. It drafts all of the target's tokens.

    Args:
      folder: has ``config.json``, and safetensors or a file of ``torch.save``.
      target: the model that the head was trained for.

    Raises:
      FileNotFoundError: the folder has no config or no tensors.
      ValueError: tensors are unknown, missing or misshapen (one error lists them all), or the config has a value that
        is not implemented or does not fit the target.
    """
    folder = Path(folder)
    config = read_config(folder / "config.json", target)
    shapes = modules.structure(DFlashHead, config)[1]
    filler = Filler(Sheet(table(config), name_of=str), shapes, target.dtype, lambda path, leaf: jnp.asarray(leaf))
    for name, array in open_folder(folder):
        filler.take(name, array)
    return DFlash(config, {**filler.finish(), "lm_head": target.head_table()}, None)


def read_config(path: Path, target: LM) -> DFlashHeadConfig:
    """The head's configuration, from ``config.json``. Raises as :func:`load`."""
    hf = read_json(path)
    own = {key: hf.pop(key, None) for key in _HEAD_ONLY}
    for key in ("bos_token_id", "eos_token_id"):
        hf.pop(key, None)  # only the target's ids count
    depth, vocab = target.config.num_hidden_layers, target.config.vocab_size
    if problems := values.problems(own, _HEAD_ONLY) or _problems(own, hf, depth, vocab):
        raise ValueError(f"{path} can't be used:\n  " + "\n  ".join(problems))
    layer = from_hf(hf)
    ids = own[KEY].get("target_layer_ids") or _spread(depth, layer.num_hidden_layers)
    try:
        return DFlashHeadConfig(layer, tuple(i + 1 for i in ids), own["block_size"], own[KEY]["mask_token_id"])
    except ValueError as problem:
        raise ValueError(f"{path} can't be used: {problem}") from problem


def _problems(own: dict[str, Any], hf: dict[str, Any], depth: int, vocab: int) -> list[str]:
    """A sentence for each value of the head's own keys that is not implemented or does not fit the target."""
    said = own[KEY]
    problems = ["block_size is missing"] if own["block_size"] is None else []
    if hf.get("model_type") != "qwen3":
        problems.append(f"model_type of a DFlash head must be 'qwen3', got {hf.get('model_type')!r}")
    if hf.get("vocab_size") != vocab:
        problems.append(
            f"vocab_size is {hf.get('vocab_size')!r}, but the head drafts with the target's output head, which has "
            f"{vocab} tokens"
        )
    if (layers := own["num_target_layers"] or said.get("num_target_layers") or depth) != depth:
        problems.append(f"num_target_layers is {layers!r}, but the target has {depth} layers")
    if not values.token_id(vocab).holds(said.get("mask_token_id")):
        problems.append(values.token_id(vocab).problem("mask_token_id", said.get("mask_token_id")))
    ids = said.get("target_layer_ids")
    if ids is not None and not values.are_rising(ids, depth):
        problems.append(f"target_layer_ids must be a rising list of layers from 0 to {depth - 1}, got {ids!r}")
    others = {key: value for key, value in said.items() if key not in _READ and value is not None}
    refused = {key: value for key, value in others.items() if value or key not in _OFF}
    return problems + [f"{KEY}: {key} = {value!r} is not implemented" for key, value in refused.items()]


def _spread(depth: int, count: int) -> list[int]:
    """The layers that a head of ``count`` layers reads if its config names none, as in the published code.

    They lie evenly from layer 1 to the last layer but two.
    """
    if count == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (count - 1)) for i in range(count)]
