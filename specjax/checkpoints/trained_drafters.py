"""Trained drafters, each in one safetensors file. Matrices are stored as int8, and the header describes the drafter.

A drafter may share its embedding and output head with the target. A file holds neither: :func:`load` takes them from
the target.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.load import published_head
from specjax.decode.types import Drafter
from specjax.drafters.dflash import DFlash
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.eagle import Eagle
from specjax.drafters.medusa import Medusa
from specjax.drafters.pass_ import PaSS
from specjax.models import llama, modules, parallel
from specjax.models.config import LlamaConfig
from specjax.models.heads.dflash_head import DFlashHead, DFlashHeadConfig
from specjax.models.heads.eagle1_head import Eagle1Head, Eagle1HeadConfig
from specjax.models.heads.eagle3_head import Eagle3Head, Eagle3HeadConfig
from specjax.models.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig
from specjax.models.heads.pass_tokens import PassConfig, PassTokens
from specjax.models.lm import LM
from specjax.models.quantized import Quantized, dequantize, map_with_path, quantize

# Kind of drafter -> (class of the configuration, class of the module, class of the drafter). A drafter is made of its
# configuration, its weights and, if the module has an output head, the tokens that the head drafts. None in place of
# the drafter's class: the drafter is a model of its own, and DraftModel holds it.
KINDS: dict[str, tuple[Any, type, Any]] = {
    "eagle": (Eagle1HeadConfig, Eagle1Head, Eagle),
    "eagle3": (Eagle3HeadConfig, Eagle3Head, Eagle),
    "dflash": (DFlashHeadConfig, DFlashHead, DFlash),
    "medusa": (MedusaHeadsConfig, MedusaHeads, Medusa),
    "pass": (PassConfig, PassTokens, PaSS),
    "model": (LlamaConfig, llama.Llama, None),
}
SHARED = ("embed", "lm_head")  # leaves that the target gives
SHIPPED = Path(__file__).parent / "trained"


def save(path: str | Path, kind: str, config: Any, params: dict, tokens: Any = None, about: dict | None = None) -> None:
    """Writes a drafter to a file.

    Args:
      path: where the file goes.
      kind: a name in ``KINDS``.
      config: the drafter's configuration, of the class that ``KINDS`` names.
      params: the drafter's weights. The leaves in ``SHARED`` are not written.
      tokens: i32[D], the target's ids of the tokens that the head drafts; None for a drafter without an output head.
      about: JSON-ready notes on how the drafter was made.

    Raises:
      ValueError: the drafter is Medusa heads with output heads of their own, which no target can give back.
    """
    from safetensors.numpy import save_file

    if getattr(config, "own_heads", False):
        raise ValueError("a file holds no output head, so Medusa heads with their own output heads can't be saved")

    arrays: dict[str, np.ndarray] = {} if tokens is None else {"tokens": np.asarray(tokens, np.int32)}

    def put(path, leaf):
        name = ".".join(path)
        if leaf.ndim == 1:
            arrays[name] = np.asarray(leaf, np.float32)
            return
        small = quantize(jnp.asarray(leaf), "int8")
        arrays[name], arrays[f"{name}.scale"] = np.asarray(small.values), np.asarray(small.scale)

    map_with_path(put, {name: leaf for name, leaf in params.items() if name not in SHARED})
    head = {"kind": kind, "config": config.to_dict(), "about": about or {}}
    save_file(arrays, path, {"specjax": json.dumps(head)})


def shipped() -> list[str]:
    """Names of the drafters that come with specjax."""
    return sorted(path.stem for path in SHIPPED.glob("*.safetensors"))


def trained_for(model: str) -> list[str]:
    """Names of the drafters that come with specjax and were trained for a model, by the name that was given for it."""
    return [name for name in shipped() if read_about(name)["about"]["model"] == model]


def shipped_for(model: str) -> str | None:
    """The name of the shipped drafter to use with a model; None if there is none.

    Args:
      model: the model's name, as given to ``specjax.load``.
    """
    if Path(model).exists():  # specjax.load then takes the path, not the name
        return None
    return next((name for name in trained_for(model) if read_about(name)["kind"] == "eagle3"), None)


def read_about(name_or_path: str | Path) -> dict:
    """The header of a drafter's file: {"kind", "config", "about"}. Raises as :func:`load`."""
    from safetensors import safe_open

    path = _locate(name_or_path)
    try:
        with safe_open(path, "np") as file:
            head = json.loads(file.metadata()["specjax"])
        return {"kind": str(head["kind"]), "config": dict(head["config"]), "about": dict(head["about"])}
    except Exception as problem:  # safetensors raises exceptions of its own classes
        raise ValueError(f"{path} is no drafter that specjax wrote: {problem}") from problem


def load(name_or_path: str | Path, target: LM) -> Drafter:
    """A trained drafter for ``target``, in the target's dtype.

    Args:
      name_or_path: one of the names in :func:`shipped`, a file that :func:`save` wrote, or the folder of a published
        EAGLE, DFlash or Medusa head.
      target: the model that the drafter was trained for.

    Raises:
      FileNotFoundError: there is no such name or file.
      ValueError: the file is no drafter, is damaged, or was trained for a model of another shape.
    """
    from safetensors.numpy import load_file

    if Path(name_or_path).is_dir():
        return published_head(name_or_path, target)
    head, path = read_about(name_or_path), _locate(name_or_path)
    arrays = load_file(path)
    config, module, make = _kind_of(path, head)
    shape, wanted = getattr(config, "layer", config), modules.structure(module, config)[1]
    if shape.hidden_size != target.hidden_size:
        raise ValueError(
            f"{path} was trained for a model of hidden size {shape.hidden_size}, but the target's is "
            f"{target.hidden_size}"
        )
    params = _read_params(path, arrays, wanted, target.dtype)
    if make is None:
        return _draft_model(path, config, params, target)
    if "lm_head" not in wanted:
        return make(config, params)
    tokens = _read_tokens(path, arrays, shape.vocab_size, target.vocab_size)
    return make(config, {**params, "lm_head": target.head_table()[tokens]}, tokens)


def _kind_of(path: Path, head: dict) -> tuple[Any, type, Any]:
    """The drafter's configuration, its module, and the class of the drafter, or None for a model of its own."""
    if head["kind"] not in KINDS:
        raise ValueError(f"{path} holds a drafter of kind {head['kind']!r}; known are {', '.join(KINDS)}")
    config_class, module, make = KINDS[head["kind"]]
    try:
        return config_class.from_dict(head["config"]), module, make
    except (TypeError, KeyError, ValueError) as problem:
        raise ValueError(f"{path} has a configuration that can't be read: {problem}") from problem


def _read_params(path: Path, arrays: dict[str, np.ndarray], wanted: dict, dtype: Any) -> dict:
    """The weights of a drafter, without the leaves in ``SHARED``. ``wanted`` is their tree, as shapes."""

    def get(keys, leaf):
        name = ".".join(keys)
        if len(leaf.shape) == 1:
            return jnp.asarray(_array(path, arrays, name, leaf.shape, np.float32), dtype)
        values = _array(path, arrays, name, leaf.shape, np.int8)
        scale = _array(path, arrays, f"{name}.scale", leaf.shape[:-1], np.float32)
        return _dequantize(Quantized(values, scale), dtype)  # type: ignore[arg-type]

    return map_with_path(get, {name: leaf for name, leaf in wanted.items() if name not in SHARED})


def _draft_model(path: Path, config: LlamaConfig, params: dict, target: LM) -> DraftModel:
    """A model of its own that takes embedding and output head from the target."""
    c = target.config
    if (config.vocab_size, config.tie_word_embeddings) != (c.vocab_size, c.tie_word_embeddings):
        raise ValueError(
            f"{path} shares the embedding and head of a model of {config.vocab_size} tokens, "
            f"{'tied' if config.tie_word_embeddings else 'untied'}; the target has {c.vocab_size}, "
            f"{'tied' if c.tie_word_embeddings else 'untied'}"
        )
    shared = {name: target.params[name] for name in SHARED if name in target.params}
    lm = LM(config, {**shared, **params}, target.tokenizer, target.kv_dtype)
    return DraftModel(parallel.replicate(lm, target.mesh))


def _read_tokens(path: Path, arrays: dict[str, np.ndarray], count: int, vocab_size: int) -> jax.Array:
    """i32[count], the target's ids of the tokens that a head drafts."""
    tokens = _array(path, arrays, "tokens", (count,), np.int32)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"{path} drafts token ids from {tokens.min()} to {tokens.max()}, outside the target's vocabulary of "
            f"{vocab_size}"
        )
    return jnp.asarray(tokens)


# Under jit there is one program per shape. Outside jit each operation would be a program of its own, and fetching such
# a program takes longer than running it.
_dequantize = jax.jit(dequantize, static_argnames="dtype")


def _array(path: Path, arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The tensor ``name`` of a file. Raises ValueError if it is absent, of another shape or dtype, or not finite."""
    found = arrays.get(name)
    if found is None or found.shape != shape or found.dtype != dtype:
        state = "absent" if found is None else f"{found.dtype}{list(found.shape)}"
        raise ValueError(f"{path}: {name} is {state}, expected {np.dtype(dtype)}{list(shape)}")
    if not np.isfinite(found).all():
        raise ValueError(f"{path}: {name} holds NaN or infinity")
    return found


def _locate(name_or_path: str | Path) -> Path:
    known = SHIPPED / f"{name_or_path}.safetensors"
    path = known if known.is_file() else Path(name_or_path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no drafter {name_or_path!r}: give a file, or one of {', '.join(shipped())}")
    return path
