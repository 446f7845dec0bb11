"""Our weights as torch tensors, in the same memory."""

import gc
import importlib
from typing import Any

import jax

from specjax.checkpoints.load import hf_parts
from specjax.models.lm import LM


def imported(package: str) -> Any:
    """A package that only peers need.

    Raises:
      ValueError: it isn't installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as problem:
        raise ValueError(f"--peers needs {package}, which can't be imported ({problem})") from problem


def tensors(lm: LM) -> dict[str, Any]:
    """Hugging Face names to torch tensors where the weights are: views, but for q, k and v, which are copied out.

    Nothing may write to them: JAX takes its arrays as constant.
    """
    torch = imported("torch")
    found = {}
    for name, part in hf_parts(lm.config).items():
        leaf = lm.params
        for key in part.path:
            leaf = leaf[key]
        whole = torch.from_dlpack(jax.block_until_ready(leaf))
        found[name] = part.of(whole).reshape(part.shape)
    return found


def free() -> None:
    """Returns what torch no longer uses to the device."""
    torch = imported("torch")
    gc.collect()
    torch.cuda.empty_cache()
