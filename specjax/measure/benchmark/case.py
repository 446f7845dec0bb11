"""The subject of a benchmark: a planted pair of models, a request, and floors.

A floor is the shortest possible time: the bytes that a step must read, over the measured read bandwidth.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.generation import requests
from specjax.measure.benchmark import dflash, eagle
from specjax.measure.benchmark import timed as measure
from specjax.measure.benchmark.drafting import Drafting, by_model
from specjax.models import config as llama_config
from specjax.models import parallel, quantized, t5_config
from specjax.models.config import LlamaConfig
from specjax.models.lm import LM
from specjax.models.t5_config import T5Config
from specjax.testing import planted_dflash, planted_eagle3, planted_pair

# The shapes by name. The last ones are no published models: with them a command can be tried on any machine.
DECODERS: dict[str, LlamaConfig] = {
    **llama_config.PRESETS,
    "tiny": LlamaConfig(512, 64, 128, 2, 4, 2, 16, max_position_embeddings=8192),
    "small": LlamaConfig(4096, 512, 1024, 3, 8, 4, 64, max_position_embeddings=8192),  # wide enough to plant a head
}
SHAPES: dict[str, Any] = {
    **DECODERS,
    **t5_config.PRESETS,
    "tiny-t5": T5Config(512, 64, 128, 2, 4, 16, 2, feed_forward_proj="gated-gelu", max_position_embeddings=8192),
}


def stored_as(other: LM, lm: LM) -> LM:
    """``lm`` with its weights and its cache stored as those of ``other``: in eight bits, if those of ``other`` are."""
    kind = quantized.kind_of(other.params)
    return dataclasses.replace(lm.quantize(kind) if kind else lm, kv_dtype=other.kv_dtype)


def _stored(lm: LM, quantize: str | None, kv_dtype: str | None) -> LM:
    """``lm`` with its weights and its cache stored as asked for."""
    return dataclasses.replace(lm.quantize(quantize) if quantize else lm, kv_dtype=kv_dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """A target and a drafter, a request, and the machine's bandwidth."""

    # The planted target.
    target: LM
    # The planted draft model, an LM. None: a head drafts.
    draft: Any
    # i64[V] The planted text: token x is followed by successor[x].
    successor: np.ndarray
    # The share of tokens whose successor the draft predicts right; of a head, at depth 1.
    alpha: float
    # K.
    num_speculative_tokens: int
    # B, the number of prompts.
    batch: int
    # The number of tokens of each prompt.
    prompt_length: int
    # The number of new tokens of each row.
    max_new_tokens: int
    # The machine's bandwidth in bytes a second, from ``timed.bandwidth``.
    speed: dict[str, float]
    # The number of devices.
    devices: int = 1
    # The number of parts of the devices that share the rows. The devices of a part share the target.
    data_parallel: int = 1
    # The seed of the weights, of the planted cycle and of the prompts.
    seed: int = 0
    # The ways to draft with a planted head.
    heads: tuple[Drafting, ...] = ()
    # The tokens that prompts are made of. None: all tokens.
    prompt_tokens: np.ndarray | None = None

    @classmethod
    def planted(
        cls,
        target: str,
        draft: str,
        alpha: float,
        dtype: str,
        speed: dict[str, float],
        quantize: str | None = None,
        quantize_draft: str | None = None,
        kv_dtype: str | None = None,
        devices: int = 1,
        data_parallel: int = 1,
        **request,
    ) -> "Case":
        """A case of planted models.

        Args:
          target, draft: names of ``SHAPES``.
          alpha, speed, devices, data_parallel, **request: the fields of the same names.
          dtype, quantize, kv_dtype: as in :func:`specjax.load`, for the target; dtype and kv_dtype for the draft too.
          quantize_draft: as ``quantize``, for the draft.

        Raises:
          ValueError: there are too few devices, their number is no multiple of ``data_parallel``, or the vocabularies
            differ.
        """
        mesh = None if devices == 1 else parallel.mesh(devices, data_parallel)
        shapes = SHAPES[target], SHAPES[draft]
        seed = request.get("seed", 0)
        big, small, successor = planted_pair(*shapes, alpha, seed=seed, dtype=jnp.dtype(dtype), mesh=mesh)
        big, small = _stored(big, quantize, kv_dtype), _stored(small, quantize_draft, kv_dtype)
        fixed: dict[str, Any] = dict(speed=speed, devices=devices, data_parallel=data_parallel)
        return cls(big, small, successor, alpha, **fixed, **request)

    @classmethod
    def planted_head(
        cls,
        target: str,
        acceptance: Sequence[str],
        depths: int,
        ways: Sequence[str],
        tree: tuple[int, int],
        dtype: str,
        speed: dict[str, float],
        quantize: str | None = None,
        kv_dtype: str | None = None,
        devices: int = 1,
        data_parallel: int = 1,
        **request,
    ) -> "Case":
        """A case whose drafter is an EAGLE-3 head of a published head's shape.

        Args:
          target: a name of ``SHAPES``.
          acceptance: as in :func:`specjax.measure.benchmark.eagle.acceptance_table`.
          depths: the most tokens or levels that are drafted.
          ways: of ``eagle.WAYS``.
          tree: the breadth of a dynamic tree, and the number of nodes of a tree.
          dtype, quantize, kv_dtype: as in :func:`specjax.load`, for the target; dtype for the head too.
          speed, devices, data_parallel, **request: the fields of the same names.

        Raises:
          ValueError: a rate is out of range, there are too few devices, or the target is too small for so many depths.
        """
        table, seed = eagle.acceptance_table(acceptance, depths), request.get("seed", 0)
        mesh = None if devices == 1 else parallel.mesh(devices, data_parallel)
        lm, head, successor = planted_eagle3(SHAPES[target], table, seed, jnp.dtype(dtype), mesh=mesh)
        lm = _stored(lm, quantize, kv_dtype)
        head = dataclasses.replace(head, prefill_chunk=64)  # a sweep catches up by a few tokens before each run
        heads, tokens = eagle.by_head(head, table, ways, *tree), np.asarray(head.tokens)
        alpha = float(table[0, 0])
        fixed: dict[str, Any] = dict(speed=speed, devices=devices, data_parallel=data_parallel)
        return cls(lm, None, successor, alpha, heads=heads, prompt_tokens=tokens, **fixed, **request)

    @classmethod
    def planted_block_head(
        cls,
        target: str,
        acceptance: Sequence[str],
        depths: int,
        dtype: str,
        speed: dict[str, float],
        quantize: str | None = None,
        kv_dtype: str | None = None,
        **request,
    ) -> "Case":
        """A case whose drafter is a DFlash head of a published head's shape. Arguments as in :meth:`planted_head`.

        Raises:
          ValueError: a rate is out of range, or the target or the head's block is too small for so many tokens.
        """
        table, seed = eagle.acceptance_table(acceptance, depths), request.get("seed", 0)
        lm, head, successor = planted_dflash(SHAPES[target], table, seed, jnp.dtype(dtype))
        tokens = np.delete(np.arange(lm.vocab_size), head.config.mask_token_id)
        heads = dflash.by_head(dataclasses.replace(head, prefill_chunk=64), table)  # as for the EAGLE-3 head
        lm, alpha = _stored(lm, quantize, kv_dtype), float(table[0, 0])
        return cls(lm, None, successor, alpha, speed=speed, heads=heads, prompt_tokens=tokens, **request)

    @property
    def drafts(self) -> tuple[Drafting, ...]:
        """The ways to draft that are measured: those of the head, or the draft model's."""
        return self.heads or (by_model(self.draft, self.alpha),)

    def prompts(self, batch: int | None = None, length: int | None = None) -> list[list[int]]:
        """Random prompts. ``batch`` and ``length`` are the request's by default."""
        rng = np.random.default_rng(self.seed)
        tokens = np.arange(self.target.config.vocab_size) if self.prompt_tokens is None else self.prompt_tokens
        shape = self.batch if batch is None else batch, self.prompt_length if length is None else length
        return tokens[rng.integers(0, len(tokens), shape)].tolist()

    def planted_text(self, prompt: list[int], count: int) -> list[int]:
        """The ``count`` tokens that follow a prompt, or the decoder's first token, in the planted text."""
        text = [*prompt, *self.target.config.start_ids][-1:]
        for _ in range(count):
            text.append(int(self.successor[text[-1]]))
        return text[1:]

    def drafting(self, lm: LM) -> LM:
        """``lm`` as another draft model: stored and placed like this case's own draft model."""
        return parallel.replicate(stored_as(self.draft, lm), self.target.mesh)

    @property
    def given_length(self) -> int:
        """The tokens of a row before its new ones: the prompt, and after a source the decoder's first token."""
        return self.prompt_length + len(self.target.config.start_ids)

    @property
    def capacity(self) -> int:
        """The number of cache entries of each row that the request needs."""
        return requests.bucket(self.given_length + self.max_new_tokens + self.num_speculative_tokens + 1, 128)

    @property
    def step_floor(self) -> float:
        """Seconds to read the weights of one step of the target once. Each device reads its own part."""
        return measure.weight_bytes(self.target) / self.shares / self.speed["read"]

    @property
    def shares(self) -> int:
        """The number of devices among which each copy of the target is cut."""
        return self.devices // self.data_parallel

    @property
    def draft_floor(self) -> float:
        """Seconds to read the weights of one step of the draft once."""
        return measure.weight_bytes(self.draft) / self.speed["read"]
