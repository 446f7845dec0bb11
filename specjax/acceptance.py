"""Alpha without waiting for luck: sum min(p, q) at every prefix of a text sampled from the target.

Leviathan et al. 2023, corollary 3.6: alpha = E[sum over x of min(p(x), q(x))]. Each prefix gets a whole block of K
drafted tokens. What stands at position i > 1 of a block matters only if the tokens before it are accepted, so it
weighs as much as the chance of that, the product of their min(1, p/q).
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, theory, topology
from specjax.drafters import NoDraft
from specjax.drafters.grow import ChainOrTree
from specjax.generation import prepare
from specjax.models.lm import LM
from specjax.requests import Options
from specjax.types import DecodeState, Draft, Drafter, Verdict
from specjax.verify import Rejection, chain


@dataclasses.dataclass(frozen=True)
class Sample:
    """What was seen at N prefixes of one prompt's text."""

    overlap: np.ndarray  # f32[N, K] sum min(p, q) at each position of the block
    weight: np.ndarray  # f32[N, K] the chance that the tokens before it are accepted; 0 where nothing was drafted


@dataclasses.dataclass(frozen=True)
class Alpha:
    """A mean and its standard error, which takes prompts and not their prefixes as independent.

    ``None`` for a mean of nothing, and for the error of a single prompt.
    """

    mean: float | None
    error: float | None


class _Witness(Rejection):
    """Keeps what a round shows it, for whoever traces that round."""

    seen: list[tuple]

    def __init__(self):
        object.__setattr__(self, "seen", [])


class _Watch(_Witness):
    """Accepts nothing and draws the target's own token, as plain decoding does; keeps what it was shown."""

    def verify(self, p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
        self.seen.append((p, draft))
        return super().verify(p, draft._replace(valid=jnp.zeros_like(draft.valid)), keys, lengths)


@partial(jax.jit, static_argnames="size", donate_argnames="state")
def _step(target: LM, drafter: Drafter, size: int, state: DecodeState) -> tuple[DecodeState, jax.Array, jax.Array]:
    """A plain step with a draft beside it. -> state, overlap f32[B, K], weight f32[B, K]."""
    watch, running = _Watch(), state.active
    state, _ = decode.round(target, drafter, watch, size, state)
    ((p, draft),) = watch.seen
    p, p_x = p[:, :size], chain.token_probs(p[:, :size], draft.tokens)
    if draft.probs is None:
        overlap, ratio = p_x, p_x
    else:
        overlap = theory.acceptance_rate(p, draft.probs)
        ratio = jnp.minimum(1.0, p_x / jnp.maximum(chain.draft_token_probs(draft), jnp.finfo(jnp.float32).tiny))
    reached = jnp.cumprod(jnp.concatenate([jnp.ones_like(ratio[:, :1]), ratio[:, :-1]], axis=1), axis=1)
    drafted = draft.valid & running[:, None]
    return state, jnp.where(drafted, overlap, 0.0), jnp.where(drafted, reached, 0.0)


def measure(
    lm: LM, prompts: Sequence, drafter: Any, num_speculative_tokens: int = 5, max_new_tokens: int = 48, **options
) -> list[Sample]:
    """Samples ``max_new_tokens`` from the target after each prompt, drafting at every one of these prefixes.

    Args:
      lm: the target.
      prompts, **options: as of ``specjax.generate``; one batch.
      drafter: any but plain decoding.
      num_speculative_tokens: K.
      max_new_tokens: an integer.

    Returns:
      One a prompt, ended early by a stop token.

    Raises:
      ValueError: as ``generate``, or if nothing would be drafted.
    """
    size, count = num_speculative_tokens, max_new_tokens
    # Room for a whole block after the last prefix.
    job = prepare(
        lm, prompts, Options(drafter=drafter, num_speculative_tokens=size, max_new_tokens=count + size, **options)
    )
    if isinstance(job.drafter, NoDraft):
        raise ValueError("plain decoding drafts nothing, so it has no alpha; choose another drafter")
    if job.block > size + 1:
        raise ValueError(f"alpha is one chain's; {type(job.drafter).__name__} drafts trees, choose a drafter of chains")
    state, steps = job.start(job.request), []
    for _ in range(count):
        running = np.asarray(state.active)
        if not running.any():
            break
        state, overlap, weight = _step(lm, job.drafter, size, state)
        steps.append((running, np.asarray(overlap), np.asarray(weight)))
    samples = []
    for row in range(len(job.prompts)):
        seen = [(overlap[row], weight[row]) for running, overlap, weight in steps if running[row]]
        overlaps, weights = (np.array(x, np.float64).reshape(-1, size) for x in zip(*seen, strict=True))
        samples.append(Sample(overlaps, weights))
    return samples


class _Node(_Witness):
    """Judges as it would, and keeps what it was shown and how far it came."""

    def verify(self, p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
        verdict = super().verify(p, draft, keys, lengths)
        self.seen.append((draft.valid, verdict.node))
        return verdict


@partial(jax.jit, static_argnames="size", donate_argnames="state")
def _tree_round(target: LM, drafter: Drafter, size: int, state: DecodeState):
    """A round, with which nodes were proposed, bool[B, N], and the last one accepted, i32[B]."""
    watch, running = _Node(), state.active
    state, _ = decode.round(target, drafter, watch, size, state)
    ((valid, node),) = watch.seen
    return state, valid & running[:, None], node


def by_rank(lm: LM, prompts: Sequence, drafter: Any, depth: int = 4, breadth: int = 4, **options) -> np.ndarray:
    """How often the child of each rank is the one accepted, by depth: what ``topology.sequoia`` makes a tree of.

    A tree is drafted whose first nodes alone go on, each with ``breadth`` children, and rounds are counted that came so
    far down.

    Args:
      lm: the target.
      prompts, **options: as of ``specjax.generate``; one batch.
      drafter: one with a ``tree``: ``TreeModel``, ``Eagle``, ``Medusa``, ``PaSS``.
      depth: K.
      breadth: M, children of a node.

    Returns:
      f64[K, M]; a row of zeros where no round came.

    Raises:
      ValueError: as ``generate``, or for a drafter without a tree.
    """
    if not isinstance(drafter, ChainOrTree):
        raise ValueError(f"acceptance by rank needs a drafter that grows trees, got {type(drafter).__name__}")
    spine = [(0,) * d + (m,) for d in range(depth) for m in range(breadth)]
    shape = topology.from_choices(spine)
    grown: Any = dataclasses.replace(drafter, tree=shape)  # type: ignore[type-var]
    job = prepare(lm, prompts, Options(drafter=grown, num_speculative_tokens=depth, **options))
    state, came, kept = job.start(job.request), np.zeros(depth), np.zeros((depth, breadth))
    while np.asarray(state.active).any():
        state, *seen = _tree_round(job.lm, job.drafter, depth, state)
        for proposed, last in zip(*jax.device_get(seen), strict=True):  # the caches stay where they are
            path = [i for i in range(1, len(shape.parents) + 1) if shape.ancestors[last, i]]
            for d in range(depth):
                here = 1 + breadth * d  # the first child of the node that the spine has at this depth
                if not proposed[here - 1]:
                    break
                came[d] += 1
                if len(path) > d:
                    kept[d, path[d] - here] += 1
                if len(path) <= d or path[d] != here:
                    break
    return kept / np.maximum(came, 1)[:, None]


def alpha(samples: Sequence[Sample], position: int = 0) -> Alpha:
    """Alpha at a position of the block, given that the tokens before it were accepted; position 0 is corollary 3.6.

    The mean over prefixes with a draft, as a ratio of sums over prompts; its error by the delta method.
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
    """Share of prefixes at which anything was drafted."""
    prefixes = sum(len(s.weight) for s in samples)
    return sum(int(np.sum(s.weight[:, 0] > 0)) for s in samples) / prefixes if prefixes else 0.0
