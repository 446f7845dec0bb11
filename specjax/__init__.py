"""specjax: lossless speculative decoding in JAX for Llama-family language models.

Each module of the package is an attribute, imported when first asked for: ``specjax.testing``, ``specjax.record``.
"""

import importlib
import pkgutil
from typing import Any

from specjax import decode, drafters, parallel, verify
from specjax.compilation import compilation_cache
from specjax.config import LlamaConfig
from specjax.generation import Event, NoDistributionError, Result, generate, stream, warmup
from specjax.load import load
from specjax.metrics import Metrics
from specjax.models.lm import LM
from specjax.requests import Options
from specjax.types import Drafter, Verifier

__version__ = "0.1.0"

__all__ = [
    "LM",
    "Drafter",
    "Event",
    "LlamaConfig",
    "Metrics",
    "NoDistributionError",
    "Options",
    "Result",
    "Verifier",
    "compilation_cache",
    "decode",
    "drafters",
    "generate",
    "load",
    "parallel",
    "stream",
    "verify",
    "warmup",
]


def __getattr__(name: str) -> Any:
    module = f"{__name__}.{name}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as problem:
        if problem.name != module:  # a module that is there, and lacks one of its own
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *(module.name for module in pkgutil.iter_modules(__path__))})
