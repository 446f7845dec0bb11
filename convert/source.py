"""Opens a checkpoint of another format, GGUF or Hugging Face's: config, tokenizer, and the stream of its tensors."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from convert import llama_weights as llama
from convert import safetensors, sharded_read
from specjax.checkpoints.json_file import read_json
from specjax.models import parallel
from specjax.models.config import LlamaConfig
from specjax.models.configs import ModelConfig, from_hf
from specjax.text.tokenizer import Tokenizer

_DTYPES = ("float32", "float16", "bfloat16")


class Source(NamedTuple):
    """A checkpoint whose names and shapes have been checked. Its weights are not read yet."""

    config: ModelConfig  # the model's shape
    tokenizer: Tokenizer | None  # None: the checkpoint has no tokenizer
    dtype: np.dtype  # the dtype that config.json states, or else one in which no weight is rounded
    tensors: Iterator[tuple[str, np.ndarray]]  # (Hugging Face name, array) of each tensor; can be read only once
    total: int  # the number of tensors
    entries: dict[str, safetensors.Entry] | None = None  # where each tensor stands; None: no part can be read alone

    def fill_parts(self, mesh: Mesh, dtype=None, quantize: str | None = None) -> dict:
        """The parameter tree, cut over a mesh. Arguments and errors as of :func:`convert.sharded_read.read`.

        Each process reads its own parts of a Llama's or a relative's safetensors, and of all else the whole file.
        """
        if self.entries is None or not isinstance(self.config, LlamaConfig):
            return self.fill(dtype, parallel.placement(self.config, mesh, quantize))
        return sharded_read.read(self.config, self.entries, dtype or self.dtype, mesh, quantize)

    def fill(self, dtype=None, place: llama.Place | None = None, label: str | None = None) -> dict:
        """Reads the weights into the parameter tree. Raises as :func:`convert.llama_weights.from_hf_tensors`.

        Args:
          dtype: the dtype of the weights; None: :attr:`dtype`.
          place: puts a finished leaf on its device; None: on the default device.
          label: the text before a line of progress on stderr, which is shown if stderr is a terminal; None: no line.
        """
        return llama.from_hf_tensors(self.config, self._counted(label), dtype or self.dtype, place)

    def _counted(self, label: str | None) -> Iterator[tuple[str, np.ndarray]]:
        with tqdm(total=self.total, desc=label, unit=" tensors", disable=None if label else True) as line:
            for item in self.tensors:
                yield item
                del item  # so that one tensor at a time is held
                line.update()


def open_source(path: str | Path) -> Source:
    """Opens a GGUF file, or a Hugging Face folder (``config.json`` and safetensors).

    Raises:
      FileNotFoundError: the path does not exist, or is a folder without a checkpoint.
      ValueError: the checkpoint is damaged or not implemented. The message names the fault.
    """
    path = Path(path)
    if path.is_file() and path.suffix != ".safetensors":
        return _open_gguf(path)
    if path.is_dir() and (path / "config.json").is_file():
        return _open_folder(path)
    if path.is_dir():
        raise FileNotFoundError(f"{path} has no config.json, so it is not a Hugging Face model folder")
    if path.is_file():
        raise ValueError(f"{path} holds tensors without a config; give the folder that has config.json beside it")
    raise FileNotFoundError(f"{path} does not exist")


def _open_gguf(path: Path) -> Source:
    from convert import gguf, gguf_llama, gguf_tokenizer  # the gguf package takes 0.3 s to import

    file = gguf.GGUF(path)
    config = gguf_llama.read_config(file)
    llama.check(config, gguf_llama.shapes(file))
    tokenizer = gguf_tokenizer.read(file)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{path}: tokenizer.ggml.tokens has {tokenizer.vocab_size} ids, but the embedding has {config.vocab_size} "
            "rows; they belong to different models"
        )
    total = len(file.tensors) - (gguf_llama.FREQUENCIES in file.tensors)
    return Source(config, tokenizer, np.dtype(np.float32), gguf_llama.tensors(file, config), total)


def _open_folder(folder: Path) -> Source:
    generation = folder / "generation_config.json"
    hf = read_json(folder / "config.json")
    config = from_hf(hf, read_json(generation) if generation.is_file() else None)
    checkpoint = safetensors.open_checkpoint(folder)
    llama.check(config, checkpoint.shapes())
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    _check_rows(folder, config, tokenizer)
    stated = hf.get("dtype") or hf.get("torch_dtype")
    dtype = np.dtype(jnp.dtype(stated)) if stated in _DTYPES else checkpoint.dtype
    return Source(config, tokenizer, dtype, iter(checkpoint), len(checkpoint.entries), checkpoint.entries)


def _check_rows(folder: Path, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Raises ValueError if ordinary tokens have no row in the model. Added tokens, such as [PAD], may have no row."""
    if tokenizer is None:
        return
    added = tokenizer.backend.get_added_tokens_decoder()
    words = {i: text for text, i in tokenizer.backend.get_vocab().items() if i >= config.vocab_size and i not in added}
    if words:
        first = min(words)
        raise ValueError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, but vocab_size in config.json is "
            f"{config.vocab_size}, so the model lacks {len(words)} ordinary tokens of the tokenizer, first id {first} "
            f"{words[first]!r}; the tokenizer and the model don't belong together"
        )
