"""specjax's own checkpoint folder: ``specjax.json``, orbax ``params/`` and the tokenizer's files.

Weights are stored uncompressed. Compression would hold a second copy of the model in memory while writing, and weights
hardly compress. A folder appears under its name only when it is complete.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from specjax.models import configs, families, parallel, quantized
from specjax.models.configs import ModelConfig
from specjax.text.tokenizer import Tokenizer

MARK = "specjax.json"
FORMAT = 1
_GB = 1  # gigabytes that move at a time between disk and device; orbax takes only whole numbers


def is_checkpoint(folder: str | Path) -> bool:
    """Whether the folder is marked as a checkpoint. (:func:`restore` finds out whether the checkpoint is sound.)"""
    return (Path(folder) / MARK).is_file()


def save(folder: str | Path, config: ModelConfig, params: dict, tokenizer: Tokenizer | None = None) -> None:
    """Writes a checkpoint, atomically.

    Args:
      folder: where the checkpoint goes. It must not exist, or be empty.
      config: the model's shape.
      params: the parameter tree, quantised or not.
      tokenizer: the model's tokenizer; None: the checkpoint has no tokenizer.

    Raises:
      FileExistsError: the folder exists and is not empty. Nothing is overwritten.
    """
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already; choose another place or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _save_params(work / "params", params)
        if tokenizer is not None:
            tokenizer.save(work)
        head = {
            "format": FORMAT,
            "config": config.to_dict(),
            "dtype": str(params["norm"]["weight"].dtype),
            "quantized": quantized.kind_of(params),
        }
        (work / MARK).write_text(json.dumps(head, indent=1), "utf-8")
        work.chmod(0o755)  # only the owner can read a folder of mkdtemp
        os.replace(work, folder)
    except OSError as e:
        if folder.is_dir() and any(folder.iterdir()):
            raise FileExistsError(f"{folder} was written by another process meanwhile") from e
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


class Head(NamedTuple):
    """The contents of ``specjax.json``."""

    config: ModelConfig  # the model's shape
    dtype: jnp.dtype  # the dtype of the weights that aren't quantised
    quantized: str | None  # the kind of the quantised weights, "int8" or "fp8"; None: no weight is quantised


def read_head(folder: str | Path) -> Head:
    """Reads ``specjax.json``, but no weights.

    Raises:
      ValueError: the folder is no checkpoint of this format, or is damaged.
    """
    path = Path(folder) / MARK
    if not path.is_file():
        raise ValueError(f"{folder} is no specjax checkpoint, or only half of one: it has no {MARK}; convert it again")
    try:
        head = json.loads(path.read_text("utf-8"))
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']}, this version of specjax reads {FORMAT}")
        quantized.check_kind("quantized", kind := head.get("quantized"))  # absent in files from before quantisation
        return Head(configs.from_dict(head["config"]), jnp.dtype(head["dtype"]), kind)
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path} can't be used: {e}; convert the model again") from None


def restore(
    folder: str | Path, dtype=None, quantize: str | None = None, mesh: Mesh | None = None
) -> tuple[ModelConfig, dict, Tokenizer | None]:
    """Reads a checkpoint straight to its device or devices.

    Args:
      folder: a folder that :func:`save` wrote.
      dtype: the dtype of the weights that aren't quantised; None: the stored dtype.
      quantize: "int8" or "fp8" quantises the weights while they are read. The originals of one layer at a time are
        held. None: weights stay as they are stored.
      mesh: the devices that share the weights; None: this process's first device.

    Returns:
      The configuration, the parameter tree, and the tokenizer, or None if the checkpoint has no tokenizer.

    Raises:
      ValueError: the folder is no checkpoint, is damaged, or doesn't fit its config (the message says where they
        differ); or quantised weights should be quantised again.
    """
    folder = Path(folder).absolute()
    head = read_head(folder)
    if quantize and head.quantized:
        raise ValueError(f"{folder} holds {head.quantized} weights, which can't be quantised again; leave quantize out")
    place = parallel.placement(head.config, mesh, quantize)
    wanted = _wanted(head, jnp.dtype(dtype or head.dtype), mesh)
    try:
        params = _restore_params(folder / "params", wanted, place if quantize else None)
    except Exception as e:  # orbax and tensorstore raise many classes; each means that the folder is damaged
        reason = " ".join(str(e).split())[:500]
        raise ValueError(f"{folder}/params can't be restored: {reason}; convert the model again") from e
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    return head.config, params, tokenizer


def _wanted(head: Head, dtype, mesh: Mesh | None) -> dict:
    """The tree to restore, with the shape, dtype and sharding of each leaf."""
    one = SingleDeviceSharding(jax.local_devices()[0])

    def leaf(path, x):
        shape = jax.ShapeDtypeStruct(x.shape, dtype)
        if head.quantized and quantized.is_matrix(head.config, path):
            shape = jax.eval_shape(partial(quantized.quantize, kind=head.quantized), shape)
        cut = jax.tree.map(lambda _: one, shape) if mesh is None else parallel.sharding(path, shape, mesh)
        return jax.tree.map(lambda x, cut: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut), shape, cut)

    return quantized.map_with_path(leaf, families.structure(head.config)[1])


def _check_shapes(metadata: Any, wanted: dict) -> None:
    """Raises ValueError unless orbax's metadata has exactly the leaves of ``wanted``, with the same shapes."""
    tree = getattr(metadata, "item_metadata", metadata)
    tree = getattr(tree, "tree", tree)
    name = partial(jax.tree_util.keystr, simple=True, separator="/")
    found = {name(k): tuple(v.shape) for k, v in jax.tree_util.tree_leaves_with_path(tree)}
    expected = {name(k): v.shape for k, v in jax.tree_util.tree_leaves_with_path(wanted)}
    wrong = [f"{k} is {found.get(k, 'absent')}, expected {expected.get(k, 'nothing')}"
             for k in sorted(found.keys() | expected.keys()) if found.get(k) != expected.get(k)]  # fmt: skip
    if wrong:
        raise ValueError("; ".join(wrong[:10]))


def _checkpointer():
    import orbax.checkpoint as ocp  # slow to import

    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(
            save_concurrent_gb=_GB, restore_concurrent_gb=_GB, use_ocdbt=True, use_compression=False
        )
    )


def _save_params(path: Path, params: dict) -> None:
    import orbax.checkpoint as ocp

    with _checkpointer() as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(params))


def _restore_params(path: Path, wanted: dict, place: Callable | None) -> dict:
    """The tree as wanted. With ``place``, which puts each leaf on its device, the tree is read piece by piece."""
    with _checkpointer() as checkpointer:
        _check_shapes(checkpointer.metadata(path), wanted)
        if place is None:
            return _read(checkpointer, path, wanted)
        params: dict = {"layers": {}}
        for piece in _pieces(wanted):
            read = quantized.map_with_path(place, _read(checkpointer, path, piece))
            params["layers"].update(read.pop("layers", {}))
            params.update(read)
        return params


def _pieces(tree: dict) -> Iterator[dict]:
    """The tree in parts that are read one after another: each layer, and each entry beside the layers."""
    yield from ({name: part} for name, part in tree.items() if name != "layers")
    yield from ({"layers": {i: layer}} for i, layer in tree["layers"].items())


def _read(checkpointer, path: Path, wanted: dict) -> dict:
    import orbax.checkpoint as ocp

    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True)
    return checkpointer.restore(path, args=args)
