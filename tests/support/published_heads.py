"""Drafting heads for a tiny target in the layouts that others publish."""

import json

import numpy as np
from safetensors.numpy import save_file

from convert import dflash_weights, eagle_weights, medusa_weights
from specjax.drafters import Medusa
from specjax.models import modules
from specjax.models.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig

MEDUSA_CONFIG = MedusaHeadsConfig(32, 12, num_heads=3, num_layers=2, own_heads=True)
MEDUSA = Medusa(MEDUSA_CONFIG, modules.init(MedusaHeads, MEDUSA_CONFIG, 0), None)


def tensors_of(table, params):
    """The tensors that a table of names makes of a head's weights."""
    tensors = {}
    for name, part in table.items():
        leaf = params
        for key in part.path:
            leaf = leaf[key]
        tensors[name] = np.ascontiguousarray(part.of(np.asarray(leaf)).reshape(part.shape))
    return tensors


def sizes_of(layer):
    """The keys of ``config.json`` that give a layer's shape."""
    names = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings rms_norm_eps rope_theta"
    ).split()
    return {name: getattr(layer, name) for name in names}


def publish_dflash(folder, drafter, target, change=lambda tensors: None, **config):
    """Writes a DFlash head as others would."""
    c = drafter.config
    tensors = tensors_of(dflash_weights.table(c), drafter.params)
    change(tensors)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    own = {"mask_token_id": c.mask_token_id, "target_layer_ids": [after - 1 for after in c.taps]}
    hf = sizes_of(c.layer) | {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "hidden_act": "silu"}
    hf |= {"vocab_size": target.config.vocab_size, "layer_types": ["full_attention"] * c.layer.num_hidden_layers}
    hf |= {"num_target_layers": target.config.num_hidden_layers, "block_size": c.block_size, "dflash_config": own}
    hf |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 5, "attention_bias": False}
    (folder / "config.json").write_text(json.dumps(hf | config))
    return folder


def publish_eagle(folder, drafter, target, change=lambda tensors: None, **config):
    """Writes an EAGLE head as others would."""
    c = drafter.config.layer
    tensors = tensors_of(eagle_weights.table(drafter.config), drafter.params)
    first = drafter.tokens is None
    if not first:
        tokens = np.asarray(drafter.tokens)
        tensors["d2t"] = tokens - np.arange(len(tokens))
        tensors["t2d"] = np.isin(np.arange(target.config.vocab_size), tokens)
    change(tensors)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    hf = sizes_of(c) | {"model_type": "llama"}
    hf |= {"vocab_size": target.config.vocab_size, "architectures": ["LlamaForCausalLMEagle3"]}
    if not first:
        hf |= {"draft_vocab_size": len(tokens)}
        hf |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(drafter.config.taps)}}
    hf |= config
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


def publish_medusa(folder, change=lambda tensors: None, **config):
    """Writes Medusa's heads as others would."""
    tensors = tensors_of(medusa_weights.table(MEDUSA_CONFIG), MEDUSA.params)
    change(tensors)
    folder.mkdir()
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    about = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "someone/model", **config}
    (folder / "config.json").write_text(json.dumps(about))
    return folder
