"""What a planted model takes from a command line: the tokenizer of --model, and the dtype."""

import argparse
from typing import Any

import jax
import jax.numpy as jnp

import specjax
from specjax.text.tokenizer import Tokenizer


def tokenizer_and_dtype(args: argparse.Namespace) -> tuple[Tokenizer, Any]:
    """The tokenizer of ``args.model``, and ``args.dtype`` or the usual dtype of the device.

    Raises:
      ValueError: the model has no tokenizer. Errors as of ``specjax.load`` too.
    """
    tokenizer = specjax.load(args.model).tokenizer
    if tokenizer is None:
        raise ValueError(f"--planted takes the tokenizer of --model, but {args.model} has none")
    return tokenizer, jnp.dtype(args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
