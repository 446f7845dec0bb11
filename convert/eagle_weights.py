"""Reads published EAGLE heads: a folder of ``config.json`` and tensors, by a closed table of names.

EAGLE-3's layer is named ``midlayer.*``; some trainers name it ``layers.0.*``. The tensor ``d2t`` holds for each token
that the head drafts the difference between the target's id and the head's own id. If a config has no
``draft_vocab_size``, the head is of EAGLE or EAGLE-2. Such a head has one layer without a first norm, and uses the
target's own output head.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from convert.head_tensors import open_folder
from convert.llama_weights import Filler, Part, Sheet, norm, sublayers, whole
from specjax.checkpoints.json_file import read_json
from specjax.drafters.eagle import Eagle
from specjax.models import config_values as values
from specjax.models import modules
from specjax.models.config import from_hf
from specjax.models.heads.eagle1_head import Eagle1HeadConfig
from specjax.models.heads.eagle3_head import Eagle3HeadConfig
from specjax.models.lm import LM

LAYER = "midlayer"
# Keys that only the config.json of a head has, not that of a model.
_HEAD_ONLY = {
    "draft_vocab_size": values.COUNT,
    "eagle_config": values.OBJECT,
    "target_hidden_size": values.COUNT,
    "bias": values.FLAG,
}
_TAPS, _WITH_TAPS = "eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"  # the keys of eagle_config that are read


def table(config: Eagle3HeadConfig | Eagle1HeadConfig) -> dict[str, Part]:
    """The place of every tensor in the head's tree, by the tensor's name."""
    c, size = config.layer, config.layer.hidden_size
    if isinstance(config, Eagle1HeadConfig):
        bias = {"fc.bias": whole(("fuse", "bias"), size)} if config.bias else {}
        return {
            "fc.weight": whole(("fuse", "weight"), size, 2 * size),
            **bias,
            f"{LAYER}.post_attention_layernorm.weight": norm("mlp_norm", size),
            **sublayers(c, LAYER, (), size),
        }
    return {
        "fc.weight": whole(("fuse", "weight"), size, len(config.taps) * size),
        f"{LAYER}.input_layernorm.weight": norm("embed_norm", size),
        f"{LAYER}.hidden_norm.weight": norm("hidden_norm", size),
        f"{LAYER}.post_attention_layernorm.weight": norm("mlp_norm", size),
        **sublayers(c, LAYER, (), 2 * size),
        "norm.weight": norm("norm", size),
        "lm_head.weight": whole(("lm_head",), c.vocab_size, size),
    }


def load(folder: str | Path, target: LM) -> Eagle:
    """The drafter of a published head, in the target's dtype.

    Args:
      folder: has ``config.json``, and safetensors or a file of ``torch.save``.
      target: the model that the head was trained for. If the config doesn't say after which of its L layers the head
        reads hidden states, they are those of the paper's code: after 2, L/2 and L - 3 layers.

    Raises:
      FileNotFoundError: the folder has no config or no tensors.
      ValueError: tensors are unknown, missing or misshapen (one error lists them all), or the config has a value that
        is not implemented or does not fit the target.
    """
    folder = Path(folder)
    config = read_config(folder, target)
    size = config.layer.vocab_size
    sheet = Sheet(table(config), name_of=str)
    shapes = modules.structure(config.module, config)[1]
    filler = Filler(sheet, shapes, target.dtype, lambda path, leaf: jnp.asarray(leaf))
    tokens: Any = np.arange(size)
    known, embed = None, None
    for name, array in open_folder(folder):
        key = name.removeprefix("model.").replace("layers.0.", f"{LAYER}.", 1)
        if key == "d2t":
            tokens = tokens + np.asarray(array) if array.shape == (size,) else array
        elif key == "t2d":
            known = np.flatnonzero(array)
        elif key == "embed_tokens.weight":
            embed = jnp.asarray(np.array(array), target.dtype)
        else:
            filler.take(key, array)
    vocab = target.config.vocab_size
    if tokens.shape != (size,) or (tokens < 0).any() or (tokens >= vocab).any() or len(set(tokens)) < size:
        sheet.problems.append(f"d2t must send {size} drafted tokens to as many of the target's {vocab}")
    elif known is not None and not np.array_equal(known, np.sort(tokens)):
        sheet.problems.append("t2d and d2t name different tokens")
    if embed is not None and embed.shape != (vocab, config.layer.hidden_size):
        sheet.problems.append(
            f"misshapen: embed_tokens.weight is {list(embed.shape)}, expected {[vocab, config.layer.hidden_size]}"
        )
    params = filler.finish()
    if isinstance(config, Eagle1HeadConfig):
        return Eagle(config, {**params, "lm_head": target.head_table()}, None, embed=embed)
    return Eagle(config, params, jnp.asarray(tokens, jnp.int32), embed=embed)


def read_config(folder: Path, target: LM) -> Eagle3HeadConfig | Eagle1HeadConfig:
    """The head's configuration, from the folder's ``config.json``. Raises as :func:`load`."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json, so it is no EAGLE head")
    hf = read_json(path)
    is_eagle3 = "draft_vocab_size" in hf
    head_only = {key: hf.pop(key, None) for key in _HEAD_ONLY}
    for key in ("bos_token_id", "eos_token_id"):
        hf.pop(key, None)  # only the target's ids count
    depth = target.config.num_hidden_layers
    if problems := values.problems(head_only, _HEAD_ONLY):
        raise ValueError(f"{path} can't be used:\n  " + "\n  ".join(problems))
    own = head_only["eagle_config"] or {}
    taps = own.get(_TAPS)
    if taps is not None and not values.are_rising(taps, depth + 1):
        raise ValueError(f"{path}: {_TAPS} must be a rising list of layers from 0 to {depth}, got {taps!r}")
    others = {key: value for key, value in own.items() if value and key not in (_TAPS, _WITH_TAPS)}
    if own.get(_WITH_TAPS) is False:
        others[_WITH_TAPS] = False
    if others:
        said = ", ".join(f"{key} = {value!r}" for key, value in others.items())
        raise ValueError(f"{path}: eagle_config: {said} is not implemented")
    layer = from_hf(hf)
    hidden = head_only["target_hidden_size"] or layer.hidden_size
    if layer.num_hidden_layers != 1 or hidden != layer.hidden_size:
        raise ValueError(
            f"{path}: only heads of one layer, as wide as the target, are implemented, got {layer.num_hidden_layers} "
            f"layers of width {layer.hidden_size} for a target of width {hidden}"
        )
    if not is_eagle3:
        if layer.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"{path}: a head of {layer.vocab_size} tokens drafts with the target's output head, which has "
                f"{target.config.vocab_size}"
            )
        return Eagle1HeadConfig(layer, head_only["bias"] is not False)
    layer = dataclasses.replace(layer, vocab_size=head_only["draft_vocab_size"] or layer.vocab_size)
    return Eagle3HeadConfig(layer, (2, depth // 2, depth - 3) if taps is None else tuple(taps))
