"""Hugging Face tensors to and from the parameter tree: one closed table, read in both directions. Llama's table.

A leaf of the tree may be fused: several source tensors are parts of one leaf. Each source tensor is copied (and cast)
straight into its part. So a conversion holds the model and one source tensor, in whatever order the file has them.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert import gpt2_weights, t5_weights
from convert.layout import Layout, Part, whole
from specjax.models import families, parallel
from specjax.models.config import LlamaConfig
from specjax.models.configs import ModelConfig
from specjax.models.gpt2_config import GPT2Config
from specjax.models.quantized import is_quantized
from specjax.models.t5_config import T5Config

Place = Callable[[tuple[str, ...], np.ndarray], Any]  # (path in the tree, finished leaf) -> the leaf on its device


def layout(config: ModelConfig) -> Layout:
    """The tensors of the checkpoints of a model's family."""
    if isinstance(config, T5Config):
        return t5_weights.layout(config)
    return gpt2_weights.layout(config) if isinstance(config, GPT2Config) else Layout(table(config))


def table(config: LlamaConfig) -> dict[str, Part]:
    """The place of every tensor in the tree, by the tensor's Hugging Face name without the prefix ``model.``."""
    c, hidden = config, config.hidden_size
    parts = {"embed_tokens.weight": whole(("embed",), c.vocab_size, hidden), "norm.weight": norm("norm", hidden)}
    if not c.tie_word_embeddings:
        parts["lm_head.weight"] = whole(("lm_head",), c.vocab_size, hidden)
    for i in range(c.num_hidden_layers):
        name, path = f"layers.{i}", ("layers", str(i))
        for tensor, leaf in (_FOUR_NORMS if c.post_norms else _TWO_NORMS).items():
            parts[f"{name}.{tensor}.weight"] = whole((*path, leaf, "weight"), hidden)
        parts |= sublayers(c, name, path, hidden)
    return parts


LLAMA = Layout({})  # the prefix and the buffers of Llama and its relatives
_TWO_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
_FOUR_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}


def norm(name: str, size: int) -> Part:
    """The place of a norm's weight at the top of the tree."""
    return whole((name, "weight"), size)


def sublayers(c: LlamaConfig, prefix: str, layer: tuple[str, ...], reads: int) -> dict[str, Part]:
    """The places of the tensors of a layer's attention and MLP, by name.

    Args:
      c: the model's shape.
      prefix: the beginning of the tensors' names.
      layer: the layer's path in the tree.
      reads: the size of the attention's input.
    """
    kv, group, dim, hidden, ffn = c.num_key_value_heads, c.group_size, c.head_dim, c.hidden_size, c.intermediate_size
    parts = {}
    if c.qk_norm:
        for name in ("q_norm", "k_norm"):
            parts[f"{prefix}.self_attn.{name}.weight"] = whole((*layer, "attention", name, "weight"), dim)
    qkv_bias = c.attention_bias or c.qkv_bias
    for kind, qkv, o, mlp in (("weight", True, True, True), ("bias", qkv_bias, c.attention_bias, c.mlp_bias)):
        matrix = kind == "weight"
        if qkv:
            ins = (reads,) if matrix else ()
            path, view = (*layer, "attention", "qkv", kind), (kv, group + 2, dim, *ins)
            slots = {"q": (kv * group, slice(0, group)), "k": (kv, group), "v": (kv, group + 1)}
            for name, (heads, slot) in slots.items():
                shape = (heads * dim, *ins)
                parts[f"{prefix}.self_attn.{name}_proj.{kind}"] = Part(path, shape, view, (slice(None), slot))
        if o:
            shape = (hidden, c.num_attention_heads * dim) if matrix else (hidden,)
            parts[f"{prefix}.self_attn.o_proj.{kind}"] = whole((*layer, "attention", "o", kind), *shape)
        if mlp:
            ins = (hidden,) if matrix else ()
            path, view = (*layer, "mlp", "gate_up", kind), (2, ffn, *ins)
            for slot, name in enumerate(("gate", "up")):
                parts[f"{prefix}.mlp.{name}_proj.{kind}"] = Part(path, (ffn, *ins), view, (slot,))
            parts[f"{prefix}.mlp.down_proj.{kind}"] = whole(
                (*layer, "mlp", "down", kind), *((hidden, ffn) if matrix else (hidden,))
            )
    return parts


def from_hf_tensors(
    config: ModelConfig,
    tensors: Iterable[tuple[str, np.ndarray]],
    dtype=None,
    place: Place | None = None,
) -> dict:
    """Fills the parameter tree from (Hugging Face name, array) pairs in any order. One source at a time is held.

    Args:
      config: the model's shape.
      tensors: the pairs. Each is read once and not kept. Names may lack the prefix ``model.`` (GPT-2:
        ``transformer.``), and buffers are skipped. With tied embeddings, an ``lm_head.weight`` is accepted only if it
        equals the embedding.
      dtype: the dtype of every leaf; None: the checkpoint's own. If the parts of a fused leaf differ, the leaf has the
        widest of their dtypes.
      place: puts a finished leaf on its device (``parallel.placement``); None: on the default device. The host array
        that it gets is not written again.

    Returns:
      A tree with the structure of ``specjax.models.families.structure(config)[1]``.

    Raises:
      ValueError: tensors are unknown, duplicate, missing or misshapen, or hold values that are not finite in ``dtype``.
        One error lists all of them.
    """
    place = parallel.placement(config) if place is None else place
    filler = Filler(Sheet.of(config), families.structure(config)[1], dtype, place)
    for name, array in tensors:
        filler.take(name, array)
        del array  # freed before the next source is read
    return filler.finish()


def to_hf(config: ModelConfig, params: dict) -> dict[str, np.ndarray]:
    """The inverse of :func:`from_hf_tensors`, bit for bit: Hugging Face names to contiguous host arrays."""
    return dict(iter_hf(config, params))


def iter_hf(config: ModelConfig, params: dict) -> Iterator[tuple[str, np.ndarray]]:
    """As :func:`to_hf`, one tensor at a time.

    Raises:
      ValueError: the weights are quantised, so the original values are lost.
    """
    if any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
        raise ValueError("quantised weights have no Hugging Face tensors; load the model without quantize")
    names = layout(config)
    for name, part in names.table.items():
        leaf = params
        for key in part.path:
            leaf = leaf[key]
        yield names.full_name(name), np.ascontiguousarray(part.of(np.asarray(leaf)).reshape(part.shape))


def check(config: ModelConfig, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Checks the names and shapes of all tensors before any weight is read. Raises as :func:`from_hf_tensors`."""
    sheet = Sheet.of(config)
    for name, shape in shapes:
        sheet.note(name, shape)
    sheet.finish()


class Sheet:
    """Checks tensors against a closed table: it remembers which tensors have come, and all problems.

    Args:
      table: the place of every expected tensor.
      tied: whether an ``lm_head.weight`` may come although the table has none.
      name_of: gives the name that errors show for a missing tensor of the table.
      layout: the prefix that names may have, and the buffers that are skipped.
    """

    def __init__(
        self,
        table: dict[str, Part],
        tied: bool = False,
        name_of: Callable[[str], str] = LLAMA.full_name,
        layout: Layout = LLAMA,
    ):
        self.table = table
        self.layout = layout
        self.tied = tied
        self.name_of = name_of
        self.seen: set[str] = set()
        self.problems: list[str] = []

    @classmethod
    def of(cls, config: ModelConfig) -> "Sheet":
        """The sheet of a whole model."""
        tensors = layout(config)
        return cls(tensors.table, config.tie_word_embeddings, tensors.full_name, tensors)

    def note(self, name: str, shape: tuple[int, ...]) -> Part | None:
        """The place of a tensor. None: the tensor has no place, or some problem is known, so it need not be copied.

        A tensor without a place is noted as a problem, unless it is harmless.
        """
        key = name.removeprefix(self.layout.prefix)
        if key.endswith(self.layout.buffers):
            return None  # harmless: a buffer of old checkpoints, which follows from the config
        part = self.table.get(key)
        if key == "lm_head.weight" and self.tied:
            embed = next(part for part in self.table.values() if part.path == ("embed",))
            part = embed._replace(path=())  # () marks a tensor that is compared, not kept
        if part is None:
            self.problems.append(f"unexpected: {name} {list(shape)}")
        elif key in self.seen:
            self.problems.append(f"duplicate: {name}")
        elif tuple(shape) != part.shape:
            self.problems.append(f"misshapen: {name} is {list(shape)}, expected {list(part.shape)}")
        self.seen.add(key)
        return None if self.problems else part

    def finish(self) -> None:
        """Raises one ValueError that lists all problems and all missing tensors, if there are any."""
        missing = [f"missing: {self.name_of(k)} {list(p.shape)}" for k, p in self.table.items() if k not in self.seen]
        problems = self.problems + missing
        if problems:
            shown = problems[:40] + ([f"and {len(problems) - 40} more"] if len(problems) > 40 else [])
            raise ValueError(
                "the checkpoint's tensors can't be used with its config (which sets layer count, sizes, biases, and "
                "whether the head is tied):\n  " + "\n  ".join(shown)
            )


class Filler:
    """Builds the parameter tree. A fused leaf waits on the host until its last part has come.

    Args:
      sheet: checks the tensors.
      shapes: the tree, with shapes as leaves.
      dtype: the dtype of every leaf; None: the tensors' own.
      place: puts a finished leaf on its device.
    """

    def __init__(self, sheet: Sheet, shapes: Any, dtype, place: Place):
        self.sheet = sheet
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.place = place
        self.shapes = shapes
        self.waiting: dict[tuple[str, ...], list[np.ndarray]] = {}  # path -> [the unfinished leaf]
        self.left: dict[tuple[str, ...], int] = {}  # path -> how many parts have not come yet
        for part in self.sheet.table.values():
            self.left[part.path] = self.left.get(part.path, 0) + 1
        self.tree: dict = {}
        self.digests: list[bytes] = []  # of the embedding and a tied output head, which must be equal

    def take(self, name: str, array: np.ndarray) -> None:
        """Copies a tensor to its place, or notes the problem with it."""
        part = self.sheet.note(name, array.shape)
        if part is None:
            return  # after the first problem only names and shapes are checked
        if not jnp.issubdtype(array.dtype, jnp.floating):
            self.sheet.problems.append(f"not floating point: {name} is {array.dtype}; dequantise it first")
            return
        dtype = self.dtype or jnp.dtype(array.dtype)
        if not part.path:
            self.digests.append(_digest(array, dtype))
            return
        leaf = self._leaf(part.path, dtype)
        target = part.of(leaf)
        with np.errstate(over="ignore"):  # an overflow gives infinity, which is reported below
            target[...] = array.reshape(target.shape)
        if not _all_finite(target):
            self.sheet.problems.append(f"not finite: {name} holds NaN or infinity as {leaf.dtype}")
        elif part.path == ("embed",) and self.sheet.tied:
            self.digests.append(_digest(leaf, dtype))
        self.left[part.path] -= 1
        if not self.left[part.path] and not self.sheet.problems:
            self._put(part.path, self.waiting.pop(part.path)[0])

    def finish(self) -> dict:
        """The finished tree. Raises one ValueError that lists all problems, if there are any."""
        if len(set(self.digests)) > 1:
            self.sheet.problems.append(
                "contradictory: lm_head.weight differs from the embedding, but the config says "
                "tie_word_embeddings = true; set it to false to use lm_head.weight, or remove that tensor"
            )
        self.sheet.finish()
        return self.tree

    def _leaf(self, path: tuple[str, ...], dtype) -> np.ndarray:
        """The unfinished leaf at ``path``, made or widened so that a part of this dtype fits."""
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
    """An uninitialised array. Its address is a multiple of 64, so JAX's CPU backend can use it without a copy."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _all_finite(array: np.ndarray) -> bool:
    # Checked in pieces, because a mask of the whole embedding would itself be a large array.
    rows = array.reshape(-1, array.shape[-1]) if array.ndim and array.flags.c_contiguous else array
    step = max(1, 2**20 // max(1, array.shape[-1] if array.ndim else 1))
    return all(np.isfinite(rows[i : i + step]).all() for i in range(0, len(rows), step))


def _digest(array: np.ndarray, dtype) -> bytes:
    """A hash of the values as ``dtype``. By it two tensors are compared without holding both at a time."""
    digest = hashlib.sha256()
    step = max(1, 2**20 // array.shape[-1])
    for i in range(0, len(array), step):
        digest.update(np.ascontiguousarray(array[i : i + step], dtype=dtype).tobytes())
    return digest.digest()
