"""Writes a model as a Hugging Face folder: ``config.json``, ``model.safetensors`` and the tokenizer's files."""

import json
from pathlib import Path

from convert import llama_weights
from convert.safetensors import SINGLE
from specjax.models import configs
from specjax.models.lm import LM


def save(folder: str | Path, lm: LM) -> None:
    """Writes a model in the dtype of its weights. :func:`specjax.load` and transformers read the folder.

    Args:
      folder: where the model goes. It is made. Files of the same names are overwritten.
      lm: a model that is not quantised.

    Raises:
      ValueError: the weights are quantised.
    """
    from safetensors.numpy import save_file

    folder = Path(folder)
    tensors = llama_weights.to_hf(lm.config, lm.params)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    (folder / SINGLE).chmod(0o644)  # the library lets only the owner read its files
    config = configs.to_hf(lm.config) | {"dtype": lm.dtype.name}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    if lm.tokenizer is not None:
        lm.tokenizer.save(folder)
