"""What a benchmark runs on: a planted pair of models, prompts, and the floors that their bytes set."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.generation import requests
from specjax.measure.benchmark import timed as measure
from specjax.models import parallel, quantized
from specjax.models.config import PRESETS, LlamaConfig
from specjax.models.lm import LM
from specjax.testing import planted_pair

# "tiny" is no published shape: it is there to try a command out in seconds on any machine.
SHAPES = {**PRESETS, "tiny": LlamaConfig(512, 64, 128, 2, 4, 2, 16, max_position_embeddings=8192)}


def stored_as(other: LM, lm: LM) -> LM:
    """The model in eight bits if the other is, weights and cache each."""
    kind = quantized.kind_of(other.params)
    return dataclasses.replace(lm.quantize(kind) if kind else lm, kv_dtype=other.kv_dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """Two models, a request, and the bandwidth measured beside them."""

    target: LM
    draft: LM
    successor: np.ndarray  # i64[V]: token x is followed by successor[x]
    alpha: float  # share of tokens that the draft predicts right
    num_speculative_tokens: int
    batch: int
    prompt_length: int
    max_new_tokens: int
    speed: dict[str, float]  # of measure.bandwidth
    devices: int = 1  # that share the target
    seed: int = 0  # of the weights, the cycle and the prompts

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
        """Of two names of ``SHAPES``; the rest as of :func:`specjax.checkpoints.load` and of the fields above.

        Raises:
          ValueError: too few devices, or vocabularies that differ.
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
        """``batch`` random ones of ``length`` tokens; by default as many and as long as the request's."""
        rng = np.random.default_rng(self.seed)
        shape = self.batch if batch is None else batch, self.prompt_length if length is None else length
        return rng.integers(0, self.target.config.vocab_size, shape).tolist()

    def planted_text(self, prompt: list[int], count: int) -> list[int]:
        """The ``count`` tokens that follow a prompt."""
        text = [prompt[-1]]
        for _ in range(count):
            text.append(int(self.successor[text[-1]]))
        return text[1:]

    def drafting(self, lm: LM) -> LM:
        """Another draft model, stored and placed as this case's own is."""
        return parallel.replicate(stored_as(self.draft, lm), self.target.mesh)

    @property
    def capacity(self) -> int:
        """Cache entries a row that the request takes."""
        return requests.bucket(self.prompt_length + self.max_new_tokens + self.num_speculative_tokens + 1, 128)

    @property
    def step_floor(self) -> float:
        """Seconds to read what one step of the target reads, on each device its own part."""
        return measure.weight_bytes(self.target) / self.devices / self.speed["read"]

    @property
    def draft_floor(self) -> float:
        """Seconds to read what one step of the draft reads."""
        return measure.weight_bytes(self.draft) / self.speed["read"]
