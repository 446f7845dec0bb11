"""The configurations of all families, and how each is read from a file and written to one."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from specjax.models import config as llama_config
from specjax.models import gpt2_config, t5_config
from specjax.models.config import LlamaConfig
from specjax.models.gpt2_config import GPT2Config
from specjax.models.t5_config import T5Config

ModelConfig = LlamaConfig | GPT2Config | T5Config
# The families that are no relatives of Llama, by their model_type: the class, and the module with from_hf and to_hf.
_OTHERS: dict[Any, tuple[Any, ModuleType]] = {"gpt2": (GPT2Config, gpt2_config), "t5": (T5Config, t5_config)}


def _family(model_type: Any) -> tuple[Any, Any]:
    known = _OTHERS.get(model_type) if isinstance(model_type, str) else None
    return known or (LlamaConfig, llama_config)


def from_dict(data: Mapping[str, Any]) -> ModelConfig:
    """The inverse of a configuration's ``to_dict``. Files from before relatives were read have no ``model_type``."""
    return _family(data.get("model_type"))[0].from_dict(data)


def from_hf(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The configuration that a ``config.json`` of any family describes. Arguments and errors as for Llama's."""
    return _family(hf.get("model_type"))[1].from_hf(hf, generation)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A Hugging Face ``config.json`` of a model of any family."""
    return _family(config.model_type)[1].to_hf(config)
