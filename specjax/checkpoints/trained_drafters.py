"""Trained drafters as single files: safetensors with int8 matrices, and in its header what the drafter is.

What a drafter shares with its target (embedding, output head) is not stored; :func:`load` takes it from the target.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.types import Drafter
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.eagle import Eagle
from specjax.drafters.medusa import Medusa
from specjax.drafters.pass_ import PaSS
from specjax.models import llama, modules, parallel
from specjax.models.config import LlamaConfig
from specjax.models.heads.eagle1_head import Eagle1Head, Eagle1HeadConfig
from specjax.models.heads.eagle3_head import Eagle3Head, Eagle3HeadConfig
from specjax.models.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig
from specjax.models.heads.pass_tokens import PassConfig, PassTokens
from specjax.models.lm import LM
from specjax.models.quantized import Quantized, dequantize, map_with_path, quantize

# Kind -> (configuration, module, drafter of configuration, weights and, if it has an output head, tokens); None: a
# model of its own.
KINDS: dict[str, tuple[Any, type, Any]] = {
    "eagle": (Eagle1HeadConfig, Eagle1Head, Eagle),
    "eagle3": (Eagle3HeadConfig, Eagle3Head, Eagle),
    "medusa": (MedusaHeadsConfig, MedusaHeads, Medusa),
    "pass": (PassConfig, PassTokens, PaSS),
    "model": (LlamaConfig, llama.Llama, None),
}
SHARED = ("embed", "lm_head")
SHIPPED = Path(__file__).parent / "trained"


def save(path: str | Path, kind: str, config: Any, params: dict, tokens: Any = None, about: dict | None = None) -> None:
    """Writes a drafter.

    Args:
      path: of the file.
      kind: a name of ``KINDS``.
      config: of that kind.
      params: its weights; those in ``SHARED`` are left out.
      tokens: i32[D], for a head that drafts only some tokens.
      about: JSON-ready notes on how it was made.

    Raises:
      ValueError: Medusa heads with output heads of their own, which the target couldn't give back.
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


def shipped_for(model: str) -> str | None:
    """The shipped drafter to use with a model, by the name that :func:`specjax.checkpoints.load` knows it by."""
    if Path(model).exists():  # it goes before the name
        return None
    for name in shipped():
        head = read_about(name)
        if head["kind"] == "eagle3" and head["about"]["model"] == model:
            return name
    return None


def read_about(name_or_path: str | Path) -> dict:
    """Kind, configuration and notes of a drafter's file. Raises as :func:`load`."""
    from safetensors import safe_open

    path = _locate(name_or_path)
    try:
        with safe_open(path, "np") as file:
            head = json.loads(file.metadata()["specjax"])
        return {"kind": str(head["kind"]), "config": dict(head["config"]), "about": dict(head["about"])}
    except Exception as problem:  # safetensors has exceptions of its own
        raise ValueError(f"{path} is no drafter that specjax wrote: {problem}") from problem


def load(name_or_path: str | Path, target: LM) -> Drafter:
    """A trained drafter for ``target``, in the target's dtype.

    Args:
      name_or_path: one of :func:`shipped`, a file that :func:`save` wrote, or the folder of a published EAGLE or Medusa
        head.
      target: the model it was trained for.

    Raises:
      FileNotFoundError: no such name or file.
      ValueError: the file is no drafter, is damaged, or was trained for a model of another shape.
    """
    from safetensors.numpy import load_file

    if Path(name_or_path).is_dir():
        from convert import published  # it makes drafters, so it can't be imported before them

        return published.load(name_or_path, target)
    head, path = read_about(name_or_path), _locate(name_or_path)
    arrays = load_file(path)
    if head["kind"] not in KINDS:
        raise ValueError(f"{path} holds a drafter of kind {head['kind']!r}; known are {', '.join(KINDS)}")
    config_class, module, make = KINDS[head["kind"]]
    try:
        config = config_class.from_dict(head["config"])
    except (TypeError, KeyError, ValueError) as problem:
        raise ValueError(f"{path} has a configuration that can't be read: {problem}") from problem
    wanted = modules.structure(module, config)[1]
    shape = getattr(config, "layer", config)
    if shape.hidden_size != target.hidden_size:
        raise ValueError(
            f"{path} was trained for a model of hidden size {shape.hidden_size}, but the target's is "
            f"{target.hidden_size}"
        )

    def get(keys, leaf):
        name = ".".join(keys)
        if len(leaf.shape) == 1:
            return jnp.asarray(_array(path, arrays, name, leaf.shape, np.float32), target.dtype)
        values = _array(path, arrays, name, leaf.shape, np.int8)
        scale = _array(path, arrays, f"{name}.scale", leaf.shape[:-1], np.float32)
        return _dequantize(Quantized(values, scale), target.dtype)  # type: ignore[arg-type]

    params = map_with_path(get, {name: leaf for name, leaf in wanted.items() if name not in SHARED})
    if make is None:
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
    if "lm_head" not in wanted:
        return make(config, params)
    tokens = _array(path, arrays, "tokens", (shape.vocab_size,), np.int32)
    if tokens.min() < 0 or tokens.max() >= target.vocab_size:
        raise ValueError(
            f"{path} drafts token ids from {tokens.min()} to {tokens.max()}, outside the target's vocabulary of "
            f"{target.vocab_size}"
        )
    own = jnp.asarray(tokens)
    return make(config, {**params, "lm_head": target.head_table()[own]}, own)


# One program a shape. Outside jit each operation would be a program of its own, slower to fetch than to run.
_dequantize = jax.jit(dequantize, static_argnames="dtype")


def _array(path: Path, arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A tensor of the file, which must be there, of that shape and dtype, and finite."""
    found = arrays.get(name)
    if found is None or found.shape != shape or found.dtype != dtype:
        what = "absent" if found is None else f"{found.dtype}{list(found.shape)}"
        raise ValueError(f"{path}: {name} is {what}, expected {np.dtype(dtype)}{list(shape)}")
    if not np.isfinite(found).all():
        raise ValueError(f"{path}: {name} holds NaN or infinity")
    return found


def _locate(name_or_path: str | Path) -> Path:
    known = SHIPPED / f"{name_or_path}.safetensors"
    path = known if known.is_file() else Path(name_or_path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no drafter {name_or_path!r}: give a file, or one of {', '.join(shipped())}")
    return path
