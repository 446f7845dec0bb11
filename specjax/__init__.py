"""specjax: lossless speculative decoding in JAX for Llama-family language models.

Modules that users reach by a short name are attributes of the package, imported when first asked for:
``specjax.testing``, ``specjax.record``, ``specjax.topology`` and the others in ``MODULES``.
"""

import importlib
from typing import Any

from specjax.checkpoints.load import load
from specjax.decode.decoder import Decoder
from specjax.decode.types import Drafter, Verifier
from specjax.engine.engine import Engine
from specjax.engine.errors import EngineClosedError, QueueFullError
from specjax.engine.handle import Handle
from specjax.generation.compilation import compilation_cache
from specjax.generation.generate import generate, prepare, stream, warmup
from specjax.generation.job import Job
from specjax.generation.metrics import Metrics
from specjax.generation.options import Options
from specjax.generation.result import Event, NoDistributionError, Result
from specjax.models.config import LlamaConfig
from specjax.models.lm import LM

__version__ = "0.1.0"

__all__ = [
    "LM",
    "Decoder",
    "Drafter",
    "Engine",
    "EngineClosedError",
    "Event",
    "Handle",
    "Job",
    "LlamaConfig",
    "Metrics",
    "NoDistributionError",
    "Options",
    "QueueFullError",
    "Result",
    "Verifier",
    "compilation_cache",
    "generate",
    "load",
    "prepare",
    "stream",
    "warmup",
]

# Short name -> where the module stands.
MODULES = {
    "acceptance": "measure.acceptance",
    "decode": "decode",
    "drafters": "drafters",
    "memory": "measure.memory",
    "parallel": "models.parallel",
    "random": "decode.random",
    "record": "report.record",
    "report": "report",
    "sampling": "decode.sampling",
    "testing": "testing",
    "theory": "drafting.theory",
    "timing": "measure.timing",
    "topology": "drafting.topology",
    "training": "training",
    "verify": "verify",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return importlib.import_module(f"{__name__}.{MODULES[name]}")


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})
