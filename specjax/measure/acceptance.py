"""Measures the acceptance rate alpha from probabilities: sum min(p, q) at every prefix of a text from the target.

Leviathan et al. 2023, corollary 3.6: alpha = E[sum over x of min(p(x), q(x))]. At each prefix a whole block of K tokens
is drafted. A later token of the block matters only if all tokens before it are accepted. Its weight is therefore the
probability of this: the product of min(1, p/q) over the tokens before it.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode import round as rounds
from specjax.decode.arrays import token_probs
from specjax.decode.decoder import Decoder
from specjax.decode.types import DecodeState
from specjax.drafters import NoDraft
from specjax.drafting import theory, topology
from specjax.drafting.grow_tree import ChainOrTree
from specjax.generation.generate import prepare
from specjax.models.lm import LM
from specjax.verify import Rejection
from specjax.verify import pieces as chain


@dataclasses.dataclass(frozen=True)
class Sample:
    """The measurements at N prefixes of one prompt's text."""

    # f64[N, K] The sum of min(p, q) over the vocabulary, at each position of the block.
    overlap: np.ndarray
    # f64[N, K] The probability that all tokens before the position are accepted. 0 where nothing was drafted.
    weight: np.ndarray


@dataclasses.dataclass(frozen=True)
class Alpha:
    """A mean and its standard error. Prompts count as independent; the prefixes of one prompt do not."""

    # The mean. None if nothing was drafted.
    mean: float | None
    # The standard error of the mean. None if there are fewer than two prompts, or no mean.
    error: float | None


@partial(jax.jit, donate_argnames="state")
def _step(decoder: Decoder, state: DecodeState) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Drafts a block, measures it, and then commits one token by plain decoding.

    -> the new state, the overlaps f32[B, K] and the weights f32[B, K], as in :class:`Sample`.
    """
    size, running = decoder.num_speculative_tokens, state.active
    draft, state = rounds.propose(decoder, state)
    scored = rounds.score(decoder, state, draft)
    p, draft = scored.p[:, :size], scored.draft
    p_x = token_probs(p, draft.tokens)
    if draft.probs is None:
        overlap, ratio = p_x, p_x
    else:
        overlap = theory.acceptance_rate(p, draft.probs)
        ratio = jnp.minimum(1.0, p_x / jnp.maximum(chain.draft_token_probs(draft), jnp.finfo(jnp.float32).tiny))
    reached = jnp.cumprod(jnp.concatenate([jnp.ones_like(ratio[:, :1]), ratio[:, :-1]], axis=1), axis=1)
    drafted = draft.valid & running[:, None]
    # With no valid token in the draft, the target draws its own token, as in plain decoding.
    silent = scored._replace(draft=draft._replace(valid=jnp.zeros_like(draft.valid)))
    state, _ = rounds.commit(decoder, state, silent, rounds.judge(decoder, state, silent))
    return state, jnp.where(drafted, overlap, 0.0), jnp.where(drafted, reached, 0.0)


def measure(
    lm: LM, prompts: Sequence, drafter: Any, num_speculative_tokens: int = 5, max_new_tokens: int = 48, **options
) -> list[Sample]:
    """Samples ``max_new_tokens`` tokens from the target after each prompt, and drafts a block at each prefix.

    Args:
      lm: the target.
      prompts, **options: as in ``specjax.generate``. The prompts are decoded as one batch.
      drafter: a drafter of chains.
      num_speculative_tokens: K.
      max_new_tokens: the number of prefixes of each prompt, an integer. A stop token ends a prompt's text early.

    Returns:
      One sample for each prompt.

    Raises:
      ValueError: as in ``generate``; or the drafter proposes nothing, or drafts trees.
    """
    size, count = num_speculative_tokens, max_new_tokens
    # The limit leaves room for a whole block after the last prefix.
    given = dict(drafter=drafter, num_speculative_tokens=size, max_new_tokens=count + size, **options)
    job = prepare(lm, prompts, **given)
    decoder = dataclasses.replace(job.decoder, verifier=Rejection())
    if isinstance(decoder.drafter, NoDraft):
        raise ValueError("plain decoding drafts nothing, so it has no alpha; choose another drafter")
    if decoder.plan.trees:
        name = type(decoder.drafter).__name__
        raise ValueError(f"alpha is defined for chains, and {name} drafts trees; choose a drafter of chains")
    state, steps = job.start(), []
    for _ in range(count):
        running = np.asarray(state.active)
        if not running.any():
            break
        state, overlap, weight = _step(decoder, state)
        steps.append((running, np.asarray(overlap), np.asarray(weight)))
    samples = []
    for row in range(len(job.prompts)):
        # A prompt that leaves no room for a round has no measurement.
        seen = [(overlap[row], weight[row]) for running, overlap, weight in steps if running[row]]
        overlaps, weights = np.array(seen, np.float64).reshape(-1, 2, size).swapaxes(0, 1)  # each [N, K]
        samples.append(Sample(overlaps, weights))
    return samples


@partial(jax.jit, donate_argnames="state")
def _tree_round(decoder: Decoder, state: DecodeState) -> tuple[DecodeState, jax.Array, jax.Array]:
    """One round. -> the new state, which nodes were proposed bool[B, N], and the last accepted node i32[B]."""
    running = state.active
    draft, state = rounds.propose(decoder, state)
    scored = rounds.score(decoder, state, draft)
    judged = rounds.judge(decoder, state, scored)
    state, _ = rounds.commit(decoder, state, scored, judged)
    assert judged.verdict.node is not None
    return state, scored.draft.valid & running[:, None], judged.verdict.node


def by_rank(lm: LM, prompts: Sequence, drafter: Any, depth: int = 4, breadth: int = 4, **options) -> np.ndarray:
    """How often the child of each rank is accepted, by depth. ``topology.sequoia`` builds a tree from these rates.

    The drafted tree is a spine: at each depth only the first child has children, ``breadth`` of them. At each depth the
    function counts the rounds that reached the spine's node there, and which of the node's children was accepted.

        root -+- a1 -+- b1 -+- c1    (K = 3, M = 2)
              +- a2  +- b2  +- c2

    Args:
      lm: the target.
      prompts, **options: as in ``specjax.generate``. The prompts are decoded as one batch.
      drafter: a drafter with a field ``tree``: ``TreeModel``, ``Eagle``, ``Medusa`` or ``PaSS``.
      depth: K.
      breadth: M, the number of children of a node.

    Returns:
      f64[K, M], the share of rounds in which the child of each rank was accepted. At a depth that no round reached the
      rates are 0.

    Raises:
      ValueError: as in ``generate``, or the drafter does not grow trees.
    """
    if not isinstance(drafter, ChainOrTree):
        raise ValueError(f"acceptance by rank needs a drafter that grows trees, got {type(drafter).__name__}")
    spine = [(0,) * d + (m,) for d in range(depth) for m in range(breadth)]
    shape = topology.from_choices(spine)
    grown: Any = dataclasses.replace(drafter, tree=shape)  # type: ignore[type-var]
    job = prepare(lm, prompts, drafter=grown, num_speculative_tokens=depth, **options)
    decoder = dataclasses.replace(job.decoder, verifier=Rejection())
    state, came, kept = job.start(), np.zeros(depth), np.zeros((depth, breadth))
    while np.asarray(state.active).any():
        state, *seen = _tree_round(decoder, state)
        for proposed, last in zip(*jax.device_get(seen), strict=True):  # the caches stay on the device
            path = [i for i in range(1, len(shape.parents) + 1) if shape.ancestors[last, i]]
            for d in range(depth):
                here = 1 + breadth * d  # the first child of the spine's node at this depth
                if not proposed[here - 1]:
                    break
                came[d] += 1
                if len(path) > d:
                    kept[d, path[d] - here] += 1
                if len(path) <= d or path[d] != here:
                    break
    return kept / np.maximum(came, 1)[:, None]


def alpha(samples: Sequence[Sample], position: int = 0) -> Alpha:
    """Alpha at a position of the block, given that the tokens before this position were accepted.

    The mean is over the prefixes with a draft, as a ratio of sums over prompts. The error is by the delta method.

    Args:
      samples: one sample for each prompt.
      position: from 0 to K - 1. Position 0 gives the alpha of corollary 3.6.
    """
    tops = np.array([np.sum(s.weight[:, position] * s.overlap[:, position]) for s in samples])
    bottoms = np.array([np.sum(s.weight[:, position]) for s in samples])
    if not bottoms.sum() > 0:
        return Alpha(None, None)
    mean = tops.sum() / bottoms.sum()
    count = len(samples)
    if count < 2:
        return Alpha(float(mean), None)
    spread = np.sqrt(count / (count - 1) * np.sum((tops - mean * bottoms) ** 2))
    return Alpha(float(mean), float(spread / bottoms.sum()))


def coverage(samples: Sequence[Sample]) -> float:
    """The share of prefixes at which at least one token was drafted."""
    prefixes = sum(len(s.weight) for s in samples)
    return sum(int(np.sum(s.weight[:, 0] > 0)) for s in samples) / prefixes if prefixes else 0.0
