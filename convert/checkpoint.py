"""specjax's own checkpoint folder: ``specjax.json``, orbax ``params/`` and the tokenizer's files.

Weights are stored uncompressed: compressing would hold a second copy of the model in memory while writing, and the
values hardly compress. A folder appears under its name only when it is complete.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.config import LlamaConfig
from specjax.models import llama
from specjax.tokenizer import Tokenizer

MARK = "specjax.json"
FORMAT = 1
_GB = 1  # at a time, between disk and device; orbax counts in whole gigabytes


def is_checkpoint(folder: str | Path) -> bool:
    """Whether the folder says that it is one (:func:`restore` finds out whether it is sound)."""
    return (Path(folder) / MARK).is_file()


def save(folder: str | Path, config: LlamaConfig, params: dict, tokenizer: Tokenizer | None = None) -> None:
    """Writes a checkpoint, atomically.

    Raises:
      FileExistsError: the folder exists and is not empty; nothing is overwritten.
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
        head = {"format": FORMAT, "config": config.to_dict(), "dtype": str(params["embed"].dtype)}
        (work / MARK).write_text(json.dumps(head, indent=1), "utf-8")
        work.chmod(0o755)  # mkdtemp's folder is the owner's alone
        os.replace(work, folder)
    except OSError as e:
        if folder.is_dir() and any(folder.iterdir()):
            raise FileExistsError(f"{folder} was written by another process meanwhile") from e
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def read_head(folder: str | Path) -> tuple[LlamaConfig, jnp.dtype]:
    """Configuration and stored dtype, without touching the weights.

    Raises:
      ValueError: not a checkpoint of this format, or damaged.
    """
    path = Path(folder) / MARK
    if not path.is_file():
        raise ValueError(f"{folder} is no specjax checkpoint, or only half of one: it has no {MARK}; convert it again")
    try:
        head = json.loads(path.read_text("utf-8"))
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']}, this version of specjax reads {FORMAT}")
        return LlamaConfig.from_dict(head["config"]), jnp.dtype(head["dtype"])
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path} can't be used: {e}; convert the model again") from None


def restore(folder: str | Path, dtype=None, sharding: Any = None) -> tuple[LlamaConfig, dict, Tokenizer | None]:
    """Reads a checkpoint straight to the device.

    Args:
      folder: as written by :func:`save`.
      dtype: of the weights; None keeps the stored one.
      sharding: where they go; by default the first device.

    Raises:
      ValueError: no checkpoint, or one that is damaged or doesn't fit its config; the message says what differs.
    """
    folder = Path(folder).absolute()
    config, stored = read_head(folder)
    dtype = stored if dtype is None else jnp.dtype(dtype)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0]) if sharding is None else sharding
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding), llama.structure(config)[1]
    )
    try:
        params = _restore_params(folder / "params", wanted)
    except Exception as e:  # orbax and tensorstore raise many kinds; all mean that the folder is not sound
        reason = " ".join(str(e).split())[:500]
        raise ValueError(f"{folder}/params can't be restored: {reason}; convert the model again") from e
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    return config, params, tokenizer


def _check_shapes(metadata: Any, wanted: dict) -> None:
    tree = getattr(metadata, "item_metadata", metadata)
    tree = getattr(tree, "tree", tree)
    name = jax.tree_util.keystr
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


def _restore_params(path: Path, wanted: dict) -> dict:
    import orbax.checkpoint as ocp

    with _checkpointer() as checkpointer:
        _check_shapes(checkpointer.metadata(path), wanted)
        how = ocp.checkpoint_utils.construct_restore_args(wanted)
        return checkpointer.restore(path, args=ocp.args.PyTreeRestore(wanted, restore_args=how))
