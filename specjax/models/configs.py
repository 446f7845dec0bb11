"""The configurations of all families, and how each is read from a file and written to one."""

from collections.abc import Mapping
from typing import Any

from specjax.models import config as llama_config
from specjax.models import gpt2_config
from specjax.models.config import LlamaConfig
from specjax.models.gpt2_config import GPT2Config

ModelConfig = LlamaConfig | GPT2Config


def from_dict(data: Mapping[str, Any]) -> ModelConfig:
    """The inverse of a configuration's ``to_dict``. Files from before relatives were read have no ``model_type``."""
    return (GPT2Config if data.get("model_type") == "gpt2" else LlamaConfig).from_dict(data)


def from_hf(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The configuration that a ``config.json`` of any family describes. Arguments and errors as for Llama's."""
    reader = gpt2_config.from_hf if hf.get("model_type") == "gpt2" else llama_config.from_hf
    return reader(hf, generation)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A Hugging Face ``config.json`` of a model of any family."""
    return gpt2_config.to_hf(config) if isinstance(config, GPT2Config) else llama_config.to_hf(config)
