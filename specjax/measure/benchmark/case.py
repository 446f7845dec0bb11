"""The subject of a benchmark: a planted pair of models, a request, and floors.

A floor is the shortest possible time: the bytes that a step must read, over the measured read bandwidth.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.generation import requests
from specjax.measure.benchmark import timed as measure
from specjax.models import parallel, quantized
from specjax.models.config import PRESETS, LlamaConfig
from specjax.models.lm import LM
from specjax.testing import planted_pair

# The shapes by name. "tiny" is no published model: with it a command can be tried in seconds on any machine.
SHAPES = {**PRESETS, "tiny": LlamaConfig(512, 64, 128, 2, 4, 2, 16, max_position_embeddings=8192)}


def stored_as(other: LM, lm: LM) -> LM:
    """``lm`` with its weights and its cache stored as those of ``other``: in eight bits, if those of ``other`` are."""
    kind = quantized.kind_of(other.params)
    return dataclasses.replace(lm.quantize(kind) if kind else lm, kv_dtype=other.kv_dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """Two models, a request, and the machine's bandwidth."""

    # The planted target.
    target: LM
    # The planted draft model.
    draft: LM
    # i64[V] The planted text: token x is followed by successor[x].
    successor: np.ndarray
    # The share of tokens whose successor the draft predicts right.
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
    # The number of devices that share the target.
    devices: int = 1
    # The seed of the weights, of the planted cycle and of the prompts.
    seed: int = 0

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
        **request,
    ) -> "Case":
        """A case of planted models.

        Args:
          target, draft: names of ``SHAPES``.
          alpha, speed, devices, **request: the fields of the same names.
          dtype, quantize, kv_dtype: as in :func:`specjax.load`, for the target; dtype and kv_dtype for the draft too.
          quantize_draft: as ``quantize``, for the draft.

        Raises:
          ValueError: there are too few devices, or the vocabularies differ.
        """
        mesh = None if devices == 1 else parallel.mesh(devices)
        shapes = SHAPES[target], SHAPES[draft]
        seed = request.get("seed", 0)
        big, small, successor = planted_pair(*shapes, alpha, seed=seed, dtype=jnp.dtype(dtype), mesh=mesh)
        big = big.quantize(quantize) if quantize else big
        small = small.quantize(quantize_draft) if quantize_draft else small
        big, small = (dataclasses.replace(lm, kv_dtype=kv_dtype) for lm in (big, small))
        return cls(big, small, successor, alpha, speed=speed, devices=devices, **request)

    def prompts(self, batch: int | None = None, length: int | None = None) -> list[list[int]]:
        """Random prompts. ``batch`` and ``length`` are the request's by default."""
        rng = np.random.default_rng(self.seed)
        shape = self.batch if batch is None else batch, self.prompt_length if length is None else length
        return rng.integers(0, self.target.config.vocab_size, shape).tolist()

    def planted_text(self, prompt: list[int], count: int) -> list[int]:
        """The ``count`` tokens that follow a prompt in the planted text."""
        text = [prompt[-1]]
        for _ in range(count):
            text.append(int(self.successor[text[-1]]))
        return text[1:]

    def drafting(self, lm: LM) -> LM:
        """``lm`` as another draft model: stored and placed like this case's own draft model."""
        return parallel.replicate(stored_as(self.draft, lm), self.target.mesh)

    @property
    def capacity(self) -> int:
        """The number of cache entries of each row that the request needs."""
        return requests.bucket(self.prompt_length + self.max_new_tokens + self.num_speculative_tokens + 1, 128)

    @property
    def step_floor(self) -> float:
        """Seconds to read the weights of one step of the target once. Each device reads its own part."""
        return measure.weight_bytes(self.target) / self.devices / self.speed["read"]

    @property
    def draft_floor(self) -> float:
        """Seconds to read the weights of one step of the draft once."""
        return measure.weight_bytes(self.draft) / self.speed["read"]
