"""Planted models that read and write text, so that benchmarks of texts run at any shape without a checkpoint.

They write the words of a tokenizer, in an order without meaning.
"""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.drafters.eagle import Eagle
from specjax.models.config import LlamaConfig
from specjax.models.lm import LM
from specjax.testing.planted import partly_right, planted_lm
from specjax.testing.planted_eagle import draftable_tokens, planted_eagle3
from specjax.text.tokenizer import Tokenizer


def words(tokenizer: Tokenizer, count: int) -> np.ndarray:
    """The first ids whose text is whole characters, i64[<= count] in rising order. Special tokens are left out."""
    ids = (i for i in tokenizer.ids().tolist() if tokenizer.prints(i) and "\ufffd" not in tokenizer.decode([i]))
    return np.array(list(itertools.islice(ids, count)))


def planted_writers(
    target: LlamaConfig,
    draft: LlamaConfig,
    alpha: float,
    depths: int,
    tokenizer: Tokenizer,
    seed: int = 0,
    dtype: Any = jnp.bfloat16,
) -> tuple[LM, LM, Eagle]:
    """A target that writes words, a draft model for it, and an EAGLE-3 head, both right with probability alpha.

    The target follows a random cycle over some words of the tokenizer, and goes on until its limit.

    Args:
      target, draft: the shapes. Both get the target's vocabulary, or the tokenizer's if that is larger.
      alpha: the share of the words whose successor is drafted right; by the head, at each depth anew.
      depths: the depths for which the head has guesses of their own.
      tokenizer: the tokenizer of both models.
      seed, dtype: as in :func:`specjax.testing.planted_eagle3`.

    Raises:
      ValueError: alpha is out of range, or the target's shape is too small for so many depths.
    """
    vocab = max(target.vocab_size, int(tokenizer.ids()[-1]) + 1)
    shape, small = (dataclasses.replace(config, vocab_size=vocab) for config in (target, draft))
    known = words(tokenizer, draftable_tokens(shape))
    lm, head, pi = planted_eagle3(shape, np.full((depths, 1), alpha), seed, dtype, tokens=known)
    helper = planted_lm(small, partly_right(pi, alpha, seed), 2 * seed + 2, dtype)
    lm, helper = (dataclasses.replace(x, tokenizer=tokenizer) for x in (lm, helper))
    return lm, helper, head

