"""The families of models: for each class of configurations the module that computes it."""

from flax import nnx

from specjax.models import modules
from specjax.models.config import LlamaConfig
from specjax.models.configs import ModelConfig
from specjax.models.gpt2 import GPT2
from specjax.models.gpt2_config import GPT2Config
from specjax.models.llama import Llama
from specjax.models.stack import Stack
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config

MODULES: dict[type, type[Stack]] = {LlamaConfig: Llama, GPT2Config: GPT2, T5Config: T5}


def structure(config: ModelConfig) -> tuple[nnx.GraphDef, dict]:
    """The module's graph definition, and its parameter tree with shapes as leaves. Keys are strings, also of lists."""
    return modules.structure(MODULES[type(config)], config)


def merge(config: ModelConfig, params: dict) -> Stack:
    """The module with the weights of a parameter tree. Inside ``jit`` the call costs nothing at run time."""
    return modules.merge(MODULES[type(config)], config, params)
