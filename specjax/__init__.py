"""specjax: lossless speculative decoding in JAX for Llama-family language models."""

from specjax import decode, drafters, parallel, verify
from specjax.compilation import compilation_cache
from specjax.config import LlamaConfig
from specjax.generation import Event, NoDistributionError, Result, generate, stream, warmup
from specjax.load import load
from specjax.metrics import Metrics
from specjax.models.lm import LM
from specjax.requests import Options

__version__ = "0.1.0"

__all__ = [
    "LM",
    "Event",
    "LlamaConfig",
    "Metrics",
    "NoDistributionError",
    "Options",
    "Result",
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
