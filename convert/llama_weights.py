"""Hugging Face Llama tensors to and from the parameter tree: one closed table, read in both directions.

A source tensor is copied (and cast) straight into its part of the fused tensor it belongs to, so a conversion holds
the model plus one source tensor, whatever the order in the file.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import llama, parallel
from specjax.models.config import LlamaConfig
from specjax.models.quantized import is_quantized

Place = Callable[[tuple[str, ...], np.ndarray], Any]  # (path in the tree, finished leaf) -> what the tree holds


class Part(NamedTuple):
    """Where a source tensor lives: ``leaf.reshape(view)[at]`` holds it, in the tree's leaf at ``path``."""

    path: tuple[str, ...]
    shape: tuple[int, ...]  # of the source tensor
    view: tuple[int, ...]
    at: tuple[Any, ...] = ()

    def of(self, leaf: np.ndarray) -> np.ndarray:
        """The part of a contiguous leaf, as a view of it: writing there writes the leaf."""
        return leaf.reshape(self.view)[self.at]


def table(config: LlamaConfig) -> dict[str, Part]:
    """Every tensor of a checkpoint by its Hugging Face name less the ``model.`` prefix, and its place in the tree."""
    c, hidden = config, config.hidden_size
    parts = {"embed_tokens.weight": whole(("embed",), c.vocab_size, hidden), "norm.weight": norm("norm", hidden)}
    if not c.tie_word_embeddings:
        parts["lm_head.weight"] = whole(("lm_head",), c.vocab_size, hidden)
    for i in range(c.num_hidden_layers):
        at, to = f"layers.{i}", ("layers", str(i))
        parts[f"{at}.input_layernorm.weight"] = whole((*to, "attention_norm", "weight"), hidden)
        parts[f"{at}.post_attention_layernorm.weight"] = whole((*to, "mlp_norm", "weight"), hidden)
        parts |= sublayers(c, at, to, hidden)
    return parts


def whole(path: tuple[str, ...], *shape: int) -> Part:
    """A tensor that is a leaf."""
    return Part(path, shape, shape)


def norm(name: str, size: int) -> Part:
    return whole((name, "weight"), size)


def sublayers(c: LlamaConfig, at: str, to: tuple[str, ...], reads: int) -> dict[str, Part]:
    """A layer's attention, on ``reads`` inputs, and its MLP: names begin with ``at``, their places with ``to``."""
    kv, group, dim, hidden, ffn = c.num_key_value_heads, c.group_size, c.head_dim, c.hidden_size, c.intermediate_size
    parts = {}
    for kind, bias, mlp_bias in (("weight", True, True), ("bias", c.attention_bias, c.mlp_bias)):
        matrix = kind == "weight"
        if bias:
            ins = (reads,) if matrix else ()
            path, view = (*to, "attention", "qkv", kind), (kv, group + 2, dim, *ins)
            slots = {"q": (kv * group, slice(0, group)), "k": (kv, group), "v": (kv, group + 1)}
            for name, (heads, slot) in slots.items():
                shape = (heads * dim, *ins)
                parts[f"{at}.self_attn.{name}_proj.{kind}"] = Part(path, shape, view, (slice(None), slot))
            o = (hidden, c.num_attention_heads * dim) if matrix else (hidden,)
            parts[f"{at}.self_attn.o_proj.{kind}"] = whole((*to, "attention", "o", kind), *o)
        if mlp_bias:
            ins = (hidden,) if matrix else ()
            path, view = (*to, "mlp", "gate_up", kind), (2, ffn, *ins)
            for slot, name in enumerate(("gate", "up")):
                parts[f"{at}.mlp.{name}_proj.{kind}"] = Part(path, (ffn, *ins), view, (slot,))
            parts[f"{at}.mlp.down_proj.{kind}"] = whole(
                (*to, "mlp", "down", kind), *((hidden, ffn) if matrix else (hidden,))
            )
    return parts


def from_hf_tensors(
    config: LlamaConfig,
    tensors: Iterable[tuple[str, np.ndarray]],
    dtype=None,
    place: Place | None = None,
) -> dict:
    """Fills the parameter tree from (Hugging Face name, array) pairs in any order, holding one source at a time.

    Args:
      config: the model's shape.
      tensors: each is read once and not kept. Names may lack the ``model.`` prefix; rotary ``inv_freq`` buffers are
        skipped. With tied embeddings an ``lm_head.weight`` is accepted only if it equals the embedding.
      dtype: of every leaf; None keeps the checkpoint's own, the widest where the parts of a fused tensor differ.
      place: puts a finished leaf where it stays (``parallel.placement``), by default on the default device;
        the host array handed over is not written again.

    Returns:
      The tree of ``specjax.models.llama.structure(config)[1]``.

    Raises:
      ValueError: one error that lists every unknown, duplicate, missing and misshapen tensor, and every tensor with
        values that are not finite (in ``dtype``).
    """
    place = parallel.placement(config) if place is None else place
    filler = Filler(Sheet(table(config), config.tie_word_embeddings), llama.structure(config)[1], dtype, place)
    for name, array in tensors:
        filler.take(name, array)
        del array  # before the next source is read
    return filler.finish()


def to_hf(config: LlamaConfig, params: dict) -> dict[str, np.ndarray]:
    """Inverse of :func:`from_hf_tensors`, bit for bit: Hugging Face names to contiguous host arrays."""
    return dict(iter_hf(config, params))


def iter_hf(config: LlamaConfig, params: dict) -> Iterator[tuple[str, np.ndarray]]:
    """As :func:`to_hf`, one tensor at a time.

    Raises:
      ValueError: the weights are quantised; what they were can't be had back.
    """
    if any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
        raise ValueError("quantised weights have no Hugging Face tensors; load the model without quantize")
    for name, part in table(config).items():
        leaf = params
        for key in part.path:
            leaf = leaf[key]
        yield full_name(name), np.ascontiguousarray(part.of(np.asarray(leaf)).reshape(part.shape))


def check(config: LlamaConfig, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raises the ValueError that :func:`from_hf_tensors` would for names and shapes, before any weight is read."""
    sheet = Sheet(table(config), config.tie_word_embeddings)
    for name, shape in shapes:
        sheet.note(name, shape)
    sheet.finish()


def full_name(name: str) -> str:
    """The name in a checkpoint of the whole model (``LlamaForCausalLM``)."""
    return name if name.startswith("lm_head.") else f"model.{name}"


class Sheet:
    """Which tensors of a closed table have come, and everything that was wrong with them."""

    def __init__(self, table: dict[str, Part], tied: bool = False, name_of: Callable[[str], str] = full_name):
        self.table = table
        self.tied = tied
        self.name_of = name_of
        self.seen: set[str] = set()
        self.problems: list[str] = []

    def note(self, name: str, shape: tuple[int, ...]) -> Part | None:
        """The place of a tensor; None if it has none, which is noted as a problem unless harmless."""
        key = name.removeprefix("model.")
        if key.endswith("rotary_emb.inv_freq"):
            return None  # a buffer of old checkpoints, computed from the config here
        part = self.table.get(key)
        if key == "lm_head.weight" and self.tied:
            part = self.table["embed_tokens.weight"]._replace(path=())  # compared, not kept
        if part is None:
            self.problems.append(f"unexpected: {name} {list(shape)}")
        elif key in self.seen:
            self.problems.append(f"duplicate: {name}")
        elif tuple(shape) != part.shape:
            self.problems.append(f"misshapen: {name} is {list(shape)}, expected {list(part.shape)}")
        self.seen.add(key)
        return None if self.problems else part

    def finish(self) -> None:
        missing = [f"missing: {self.name_of(k)} {list(p.shape)}" for k, p in self.table.items() if k not in self.seen]
        problems = self.problems + missing
        if problems:
            shown = problems[:40] + ([f"and {len(problems) - 40} more"] if len(problems) > 40 else [])
            raise ValueError(
                "the checkpoint's tensors can't be used with its config (which sets layer count, sizes, biases, and "
                "whether the head is tied):\n  " + "\n  ".join(shown)
            )


class Filler:
    """The tree under construction: fused leaves wait on the host until their last part has come."""

    def __init__(self, sheet: Sheet, shapes: Any, dtype, place: Place):
        self.sheet = sheet
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.place = place
        self.shapes = shapes
        self.waiting: dict[tuple[str, ...], list[np.ndarray]] = {}
        self.left: dict[tuple[str, ...], int] = {}
        for part in self.sheet.table.values():
            self.left[part.path] = self.left.get(part.path, 0) + 1
        self.tree: dict = {}
        self.digests: list[bytes] = []

    def take(self, name: str, array: np.ndarray) -> None:
        part = self.sheet.note(name, array.shape)
        if part is None:
            return  # harmless, or some problem is known: then only the names still matter
        if not jnp.issubdtype(array.dtype, jnp.floating):
            self.sheet.problems.append(f"not floating point: {name} is {array.dtype}; dequantise it first")
            return
        dtype = self.dtype or jnp.dtype(array.dtype)
        if not part.path:
            self.digests.append(_digest(array, dtype))
            return
        leaf = self._leaf(part.path, dtype)
        target = part.of(leaf)
        with np.errstate(over="ignore"):  # found just below, and named
            target[...] = array.reshape(target.shape)
        if not _all_finite(target):
            self.sheet.problems.append(f"not finite: {name} holds NaN or infinity as {leaf.dtype}")
        elif part.path == ("embed",) and self.sheet.tied:
            self.digests.append(_digest(leaf, dtype))
        self.left[part.path] -= 1
        if not self.left[part.path] and not self.sheet.problems:
            self._put(part.path, self.waiting.pop(part.path)[0])

    def finish(self) -> dict:
        if len(set(self.digests)) > 1:
            self.sheet.problems.append(
                "contradictory: lm_head.weight differs from model.embed_tokens.weight, but the config says "
                "tie_word_embeddings = true; set it to false to use lm_head.weight, or remove that tensor"
            )
        self.sheet.finish()
        return self.tree

    def _leaf(self, path: tuple[str, ...], dtype) -> np.ndarray:
        if path not in self.waiting:
            shape = self.shapes
            for key in path:
                shape = shape[key]
            self.waiting[path] = [empty(shape.shape, dtype)]
        leaf = self.waiting[path][0]
        wide = jnp.promote_types(leaf.dtype, dtype)
        if self.dtype is None and wide != leaf.dtype:
            self.waiting[path] = [leaf := leaf.astype(wide)]
        return leaf

    def _put(self, path: tuple[str, ...], leaf: np.ndarray) -> None:
        node = self.tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = self.place(path, leaf)


def empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An uninitialised array at an address that the CPU backend can adopt without a copy (a multiple of 64)."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _all_finite(array: np.ndarray) -> bool:
    # By pieces: a mask of the whole embedding would itself be a large tensor.
    rows = array.reshape(-1, array.shape[-1]) if array.ndim and array.flags.c_contiguous else array
    step = max(1, 2**20 // max(1, array.shape[-1] if array.ndim else 1))
    return all(np.isfinite(rows[i : i + step]).all() for i in range(0, len(rows), step))


def _digest(array: np.ndarray, dtype) -> bytes:
    """Of the values as ``dtype``: two tensors are compared without being held together."""
    digest = hashlib.sha256()
    step = max(1, 2**20 // array.shape[-1])
    for i in range(0, len(array), step):
        digest.update(np.ascontiguousarray(array[i : i + step], dtype=dtype).tobytes())
    return digest.digest()
