"""``load``: a model by name or path."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from convert import checkpoint, default_model
from convert.source import open_source
from specjax.models import parallel, quantized
from specjax.models.config import LlamaConfig
from specjax.models.lm import LM
from specjax.text.tokenizer import Tokenizer

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_CHOICES = (
    f"give {default_model.NAME!r}, a Hugging Face folder (config.json and safetensors), a GGUF file, a folder written "
    "by scripts/convert.py, or a hub name org/name"
)


def load(
    name_or_path: str | Path,
    dtype=None,
    quantize: str | None = None,
    kv_dtype: str | None = None,
    mesh: Mesh | None = None,
) -> LM:
    """Loads a Llama-family model and its tokenizer; every weight goes to the device as it is read.

    A text ends at each of ``config.eos_token_ids``: the ids that config.json, generation_config.json (or the GGUF file)
    and the tokenizer name, together.

    Args:
      name_or_path: ``smollm2-135m-instruct`` (fetched and converted on first use, then cached), a local Hugging Face
        folder, a GGUF file, a folder written by ``scripts/convert.py``, or a hub name ``org/name``. A path that
        exists goes before a name.
      dtype: of weights, activations and cache: float32, bfloat16 or float16. None is float32 on a CPU, where the
        others are slow; elsewhere the checkpoint's own, and bfloat16 for GGUF files and the default model.
      quantize: "int8" or "fp8" (float8_e4m3fn) stores every matrix that a step reads whole in eight bits, with one
        float32 scale an output channel; see :mod:`specjax.models.quantized`. One tensor at a time is held unquantised.
      kv_dtype: "int8" stores cached keys and values in eight bits, with one float32 scale a head and token.
      mesh: devices to cut the model over, each tensor straight to its parts; see :mod:`specjax.models.parallel`.

    Raises:
      FileNotFoundError: nothing there; the message says what would work.
      ValueError: the checkpoint is damaged, not implemented, or already quantised, naming what is wrong; ``dtype``,
        ``quantize`` or ``kv_dtype`` is none of those; the mesh can't share the model evenly.
    """
    dtype = _check_dtype(dtype)
    quantized.check_kind("quantize", quantize)
    quantized.check_kind("kv_dtype", kv_dtype, ("int8", None))
    path = locate(name_or_path)
    default = str(name_or_path) == default_model.NAME and not Path(name_or_path).exists()
    if dtype is None and jax.default_backend() == "cpu":
        dtype = jnp.dtype(jnp.float32)
    if dtype is None and (default or path.is_file()):
        dtype = jnp.dtype(jnp.bfloat16)
    if checkpoint.is_checkpoint(path):
        config, params, tokenizer = checkpoint.restore(path, dtype, quantize, mesh)
    else:
        source = open_source(path)
        config, tokenizer = source.config, source.tokenizer
        params = source.fill(dtype, parallel.placement(config, mesh, quantize))
    return LM(_with_stop_token(config, tokenizer), params, tokenizer, kv_dtype, parallel.cache_sharding(mesh))


def _with_stop_token(config: LlamaConfig, tokenizer: Tokenizer | None) -> LlamaConfig:
    """The config, with the tokenizer's end token too: chat fine-tunes often name their end of turn only there."""
    eos = None if tokenizer is None else tokenizer.eos_id
    if eos is None or eos in config.eos_token_ids or eos >= config.vocab_size:
        return config
    return dataclasses.replace(config, eos_token_ids=(*config.eos_token_ids, eos))


def locate(name_or_path: str | Path) -> Path:
    """The local file or folder of a model, fetched if need be. Raises as :func:`load`."""
    path, name = Path(name_or_path).expanduser(), str(name_or_path)
    if path.exists():
        return path
    if name == default_model.NAME:
        return default_model.ensure()
    if isinstance(name_or_path, str) and _HUB_NAME.fullmatch(name):
        return _from_hub(name)
    raise FileNotFoundError(f"{name!r} is neither a file, a folder nor the name of a model; {_CHOICES}")


def _from_hub(name: str) -> Path:
    import huggingface_hub  # slow to import

    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except Exception as e:  # network, permission and cache errors of several libraries
        reason = " ".join(str(e).split())[:300]
        raise FileNotFoundError(
            f"{name!r} is no local path, and as a hub name it is neither in the Hugging Face cache nor to be had from "
            f"the hub ({type(e).__name__}: {reason}); with no connection, {_CHOICES} that is cached"
        ) from e


def _check_dtype(dtype):
    if dtype is None:
        return None
    allowed = [jnp.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16)]
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in allowed:
        raise ValueError(f"dtype {dtype!r} is not one of float32, bfloat16, float16")
    return found
