"""The tokens and the texts that end a row."""

from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.decode.numeric import is_int
from specjax.decode.sampling import NO_TOKEN
from specjax.models.model import Model

if TYPE_CHECKING:
    from specjax.generation.options import Options


def stop_strings(options: "Options") -> tuple[str, ...]:
    return (options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ())


def stop_token_ids(lm: Model, options: "Options") -> list[int]:
    """The tokens that end a row: ``eos_token_id``, else the model's own; and stop strings that are special tokens.

    Raises:
      ValueError: ``eos_token_id`` is no id of the model.
    """
    given: Any = options.eos_token_id
    if options.ignore_eos:
        ids = []
    elif given is None:
        ids = list(lm.config.eos_token_ids)
    else:
        ids = list(given) if isinstance(given, list | tuple) else [given]
        for token in ids:
            if not (is_int(token) and 0 <= token < lm.vocab_size):
                raise ValueError(
                    f"eos_token_id must be an id below the vocabulary size {lm.vocab_size}, or a list of such, "
                    f"got {given!r}"
                )
    for text in stop_strings(options):  # a special token prints nothing, so its text is never found
        token = lm.tokenizer.special_id(text)  # type: ignore[union-attr]
        ids += [] if token is None else [token]
    return list(dict.fromkeys(ids))


def stop_ids(lm: Model, options: "Options", batch: int) -> np.ndarray:
    """i32[B, E], with E a multiple of 4 so that one more stop token seldom compiles anew."""
    ids = stop_token_ids(lm, options)
    padded = np.full(max(4, -(-len(ids) // 4) * 4), NO_TOKEN, np.int32)
    padded[: len(ids)] = ids
    return np.tile(padded, (batch, 1))
