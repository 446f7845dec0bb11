"""specjax's weights as torch tensors in the same memory."""

import gc
import importlib
from typing import Any

import jax

from specjax.checkpoints.load import hf_parts
from specjax.models.lm import LM


def imported(package: str) -> Any:
    """A package that only peers need.

    Raises:
      ValueError: the package can't be imported.
    """
    try:
        return importlib.import_module(package)
    except ImportError as problem:
        raise ValueError(f"--peers needs {package}, which can't be imported ({problem}); install it") from problem


def tensors(lm: LM) -> dict[str, Any]:
    """The weights as torch tensors by their Hugging Face names, on the device where the weights are.

    The tensors are views of the weights, except those of q, k and v, which are copies. Nothing may write to a view,
    because JAX relies on its arrays being constant.
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
    """Gives the memory that torch no longer uses back to the device."""
    torch = imported("torch")
    gc.collect()
    torch.cuda.empty_cache()
