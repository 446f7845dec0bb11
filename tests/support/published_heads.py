"""Drafting heads for a tiny target in the layouts that others publish."""

import json

import numpy as np
from safetensors.numpy import save_file

from convert import eagle_weights, medusa_weights
from specjax.drafters import Medusa
from specjax.models import modules
from specjax.models.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig

MEDUSA_CONFIG = MedusaHeadsConfig(32, 12, num_heads=3, num_layers=2, own_heads=True)
MEDUSA = Medusa(MEDUSA_CONFIG, modules.init(MedusaHeads, MEDUSA_CONFIG, 0), None)


def publish_eagle(folder, drafter, target, change=lambda tensors: None, **config):
    """Writes an EAGLE head as others would."""
    c = drafter.config.layer
    tensors = {}
    for name, part in eagle_weights.table(drafter.config).items():
        leaf = drafter.params
        for key in part.path:
            leaf = leaf[key]
        tensors[name] = np.ascontiguousarray(part.of(np.asarray(leaf)).reshape(part.shape))
    first = drafter.tokens is None
    if not first:
        tokens = np.asarray(drafter.tokens)
        tensors["d2t"] = tokens - np.arange(len(tokens))
        tensors["t2d"] = np.isin(np.arange(target.config.vocab_size), tokens)
    change(tensors)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    names = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings rms_norm_eps rope_theta"
    ).split()
    hf = {name: getattr(c, name) for name in names} | {"model_type": "llama"}
    hf |= {"vocab_size": target.config.vocab_size, "architectures": ["LlamaForCausalLMEagle3"]}
    if not first:
        hf |= {"draft_vocab_size": len(tokens)}
        hf |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(drafter.config.taps)}}
    hf |= config
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


def publish_medusa(folder, change=lambda tensors: None, **config):
    """Writes Medusa's heads as others would."""
    tensors = {}
    for name, part in medusa_weights.table(MEDUSA_CONFIG).items():
        leaf = MEDUSA.params
        for key in part.path:
            leaf = leaf[key]
        tensors[name] = np.ascontiguousarray(part.of(np.asarray(leaf)).reshape(part.shape))
    change(tensors)
    folder.mkdir()
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    about = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "someone/model", **config}
    (folder / "config.json").write_text(json.dumps(about))
    return folder
