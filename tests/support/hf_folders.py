"""Hugging Face folders of tiny models with random weights."""

import json

import numpy as np
from safetensors.numpy import save_file

from convert import llama_weights as convert_llama
from specjax.models.config import from_hf

TINY = {"model_type": "llama", "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
HF = {**TINY, "vocab_size": 272, "eos_token_id": 1, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}


def random_tensors(config, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    table = convert_llama.table(config)
    return {
        convert_llama.LLAMA.full_name(name): (rng.normal(size=part.shape) / np.sqrt(part.shape[-1])).astype(dtype)
        for name, part in table.items()
    }


def write_hf(folder, hf=HF, tokenizer=None, generation=None, **changes):
    """A Hugging Face folder with random weights; returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer is not None:
        tokenizer.save(folder)
    tensors = {**random_tensors(from_hf(hf)), **changes}
    save_file(tensors, folder / "model.safetensors")
    return tensors
