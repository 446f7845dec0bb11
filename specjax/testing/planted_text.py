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


def planted_writer(
    config: LlamaConfig, tokenizer: Tokenizer, peak: float = 12.0, seed: int = 0, dtype: Any = jnp.bfloat16
) -> LM:
    """A model that writes words, for trying out training: it samples from a random cycle, which a head can learn.

    The model follows a random cycle over some words of the tokenizer. At temperature 1 and the default ``peak`` it
    leaves the cycle for a random word after one token in six.

    Args:
      config: the shape. A vocabulary that is smaller than the tokenizer's is widened.
      tokenizer: the model's tokenizer.
      peak: the logit of a word's successor. Other words have logits near 0, and all else is impossible.
      seed, dtype: as in :func:`specjax.testing.planted_lm`.
    """
    shape = dataclasses.replace(config, vocab_size=_vocab(config, tokenizer))
    known, pi = words(tokenizer, draftable_tokens(shape)), np.arange(shape.vocab_size)
    order = np.random.default_rng(seed).permutation(known)
    pi[order] = np.roll(order, -1)
    lm = planted_lm(shape, pi, seed, dtype, peak)
    # The first channel of each state is 1 before the last norm, so its weight in a row of the head shifts a logit.
    others = np.setdiff1d(np.arange(shape.vocab_size), known)
    lm.params["embed"] = lm.params["embed"].at[:, 0].set(1.0)
    lm.params["lm_head"] = lm.params["lm_head"].at[:, 0].set(0.0).at[others].set(0.0).at[others, 0].set(-1000.0)
    return dataclasses.replace(lm, tokenizer=tokenizer)


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
    vocab = _vocab(target, tokenizer)
    shape, small = (dataclasses.replace(config, vocab_size=vocab) for config in (target, draft))
    known = words(tokenizer, draftable_tokens(shape))
    lm, head, pi = planted_eagle3(shape, np.full((depths, 1), alpha), seed, dtype, tokens=known)
    helper = planted_lm(small, partly_right(pi, alpha, seed), 2 * seed + 2, dtype)
    lm, helper = (dataclasses.replace(x, tokenizer=tokenizer) for x in (lm, helper))
    return lm, helper, head



def _vocab(config: LlamaConfig, tokenizer: Tokenizer) -> int:
    """The vocabulary size of the shape, or as many as hold all ids of the tokenizer."""
    return max(config.vocab_size, int(tokenizer.ids()[-1]) + 1)
