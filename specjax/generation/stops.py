"""The tokens and the strings that end a row."""

from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.decode.numeric import is_int, without_arrays
from specjax.decode.sampling import NO_TOKEN
from specjax.generation.padding import padded
from specjax.models.model import Model

if TYPE_CHECKING:
    from specjax.generation.options import Options


def stop_strings(options: "Options") -> tuple[str, ...]:
    """The strings of the option ``stop``. Values of ``stop`` that are no strings are kept, so that they are refused."""
    given = without_arrays(options.stop)
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple | set | frozenset) else (given,)


def stop_token_ids(lm: Model, options: "Options") -> list[int]:
    """The tokens that end a row.

    These are ``eos_token_id``, or without this option the model's own end-of-text tokens; with ``ignore_eos`` neither.
    A stop string that is a special token of the tokenizer adds this token.

    Raises:
      ValueError: ``eos_token_id`` holds a value that is no id of the model.
    """
    given: Any = options.eos_token_id
    if options.ignore_eos:
        ids = []
    elif given is None:
        ids = list(lm.config.eos_token_ids)
    else:
        given = without_arrays(given)
        ids = list(given) if isinstance(given, list | tuple) else [given]
        for token in ids:
            if not (is_int(token) and 0 <= token < lm.vocab_size):
                raise ValueError(
                    f"eos_token_id must be an id below the vocabulary size {lm.vocab_size}, or a list of such ids, "
                    f"got {given!r}"
                )
    for text in stop_strings(options):  # a special token adds no text, so a search of the text would never find it
        token = lm.tokenizer.special_id(text)  # type: ignore[union-attr]
        ids += [] if token is None else [token]
    return list(dict.fromkeys(ids))


def stop_ids(lm: Model, options: "Options", batch: int) -> np.ndarray:
    """The tokens that end each row, the same in every row, padded with NO_TOKEN. -> i32[B, E].

    Raises:
      ValueError: ``eos_token_id`` holds a value that is no id of the model.
    """
    return padded([stop_token_ids(lm, options)] * batch, NO_TOKEN, np.int32)
