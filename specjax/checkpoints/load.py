"""``load``: a model by name or path. Of specjax, only this file imports ``convert``, the readers of other formats."""

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from convert import checkpoint, default_model, llama_weights
from convert.layout import Part
from convert.source import Source, open_source
from specjax.models import parallel, quantized
from specjax.models.configs import ModelConfig
from specjax.models.lm import LM
from specjax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specjax.decode.types import Drafter

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
    """Loads a model and its tokenizer. Every weight goes to the device as soon as it is read.

    A text ends at each id of ``config.eos_token_ids``. These are all ids that config.json, generation_config.json (or
    the GGUF file) and the tokenizer name.

    Args:
      name_or_path: ``smollm2-135m-instruct`` (fetched and converted on first use, then cached), a local Hugging Face
        folder, a GGUF file, a folder written by ``scripts/convert.py``, or a hub name ``org/name``. If a path of this
        name exists, the path is used.
      dtype: the dtype of weights, activations and cache: float32, bfloat16 or float16. None means float32 on a CPU,
        where the other two are slow. Elsewhere None means bfloat16 for GGUF files and the default model, and the
        checkpoint's own dtype for all others.
      quantize: "int8" or "fp8" (float8_e4m3fn) stores in eight bits every matrix that a step reads whole, with one
        float32 scale per output channel; see :mod:`specjax.models.quantized`. At most one tensor at a time is held
        unquantised. None: nothing is quantised.
      kv_dtype: "int8" stores cached keys and values in eight bits, with one float32 scale per head and token. None:
        they are stored in ``dtype``.
      mesh: the devices that share the model. Each tensor goes straight to the devices, in parts; see
        :mod:`specjax.models.parallel`. Of safetensors and of specjax's own folders, each of several processes reads its
        own parts alone. None: one device.

    Raises:
      FileNotFoundError: there is no such model; the message says which names and paths work.
      ValueError: the checkpoint is damaged, not implemented, or already quantised (the message names the fault);
        ``dtype``, ``quantize`` or ``kv_dtype`` is none of the values above; the mesh can't share the model evenly.
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
        config, params, tokenizer = source.config, _filled(source, dtype, quantize, mesh), source.tokenizer
    config, sharding = _with_stop_token(config, tokenizer), parallel.cache_sharding(mesh)
    return LM(config, params, tokenizer, kv_dtype, sharding, str(name_or_path))


def _filled(source: Source, dtype, quantize: str | None, mesh: Mesh | None) -> dict:
    """The weights of a checkpoint of another format, on their devices."""
    if mesh is not None and parallel.spans_processes(mesh):
        return source.fill_parts(mesh, dtype, quantize)
    return source.fill(dtype, parallel.placement(source.config, mesh, quantize))


def _with_stop_token(config: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """The config with the tokenizer's end token added. Chat fine-tunes often name their end of turn only there."""
    eos = None if tokenizer is None else tokenizer.eos_id
    if eos is None or eos in config.eos_token_ids or eos >= config.vocab_size:
        return config
    return dataclasses.replace(config, eos_token_ids=(*config.eos_token_ids, eos))


def locate(name_or_path: str | Path) -> Path:
    """The local file or folder of a model. It is fetched if necessary. Raises as :func:`load`."""
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
            f"{name!r} is no local path. As a hub name it is not in the Hugging Face cache, and could not be fetched "
            f"from the hub ({type(e).__name__}: {reason}). Without a connection, {_CHOICES} that is cached"
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


def hf_parts(config: ModelConfig) -> dict[str, Part]:
    """The place of every tensor of a checkpoint in the parameter tree, by the tensor's full Hugging Face name."""
    layout = llama_weights.layout(config)
    return {layout.full_name(name): part for name, part in layout.table.items()}


def published_head(folder: str | Path, target: LM) -> "Drafter":
    """The drafter of a published EAGLE or Medusa head. Arguments and errors as of :func:`convert.published.load`."""
    from convert import published  # imported late: the reader imports the drafters, and they import this file

    return published.load(folder, target)
