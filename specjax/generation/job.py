"""A checked request, ready for the compiled functions: what is done with it is done without checking it again."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decode import decoder as compiled
from specjax.decode.decoder import Decoder
from specjax.decode.types import DecodeState, Request
from specjax.drafters import NoDraft
from specjax.generation import logprobs
from specjax.generation.completion import Completion, result_of
from specjax.generation.options import Options
from specjax.generation.result import Result
from specjax.generation.stops import stop_strings
from specjax.generation.stream import Stream


@dataclasses.dataclass(frozen=True)
class Job:
    """One batch of prompts and how to decode them. Made by :func:`specjax.prepare`."""

    decoder: Decoder
    prompts: list[list[int]]  # token ids
    request: Request
    tokens: jax.Array  # i32[B, L], the prompts
    chunk: int  # tokens that a prefill call reads
    options: Options

    def start(self, request: Request | None = None) -> DecodeState:
        """The state after the prompts; ``request`` replaces the job's own."""
        request = self.request if request is None else request
        return self.decoder.start(request, self.tokens, self.chunk, logprobs=logprobs.wanted(self.options.logprobs))

    def compile(self, streaming: bool = False) -> None:
        """Compiles prefill and rounds, and runs nothing: jobs may do so in threads."""
        compiled.lower_rounds(self.decoder, self.compile_start(), streaming)

    def compile_start(self) -> Any:
        """Compiles prefill alone. -> the shapes of the state after it."""
        asked = logprobs.wanted(self.options.logprobs)
        return compiled.lower_start(self.decoder, self.request, self.tokens, self.chunk, asked)

    def warmup(self, streaming: bool = False) -> None:
        """Compiles what :meth:`generate` (or :meth:`stream`) will run, and runs one block of it.

        The first execution of a compiled program is slow too: kernels and weights are touched for the first time. The
        block follows the first two tokens of each prompt: the programs don't depend on the prompt's length.
        """
        lengths = jnp.minimum(self.request.prompt_lengths, 2)
        limit = jnp.minimum(self.request.limit, lengths + self.decoder.num_speculative_tokens + 2)
        state = self.start(self.request._replace(prompt_lengths=lengths, limit=limit))
        by_round = streaming or bool(stop_strings(self.options))
        state = self.decoder.round(state)[0] if by_round else self.decoder.run(state)
        jax.block_until_ready(state.lengths)

    def generate(self) -> Result:
        """Decodes all prompts together; the whole loop runs on the device.

        Raises:
          NoDistributionError: if a row ends up with no finite logit.
        """
        if stop_strings(self.options):  # strings can only be looked for on the host
            rounds = self.stream()
            for _ in rounds:
                pass
            return rounds.result()
        began = time.perf_counter()
        state = self.start()
        jax.block_until_ready(state.lengths)
        prefilled = time.perf_counter()
        state = self.decoder.run(state)
        host = jax.device_get((state.tokens, state.lengths, state.failed, state.history))
        seconds = {"prefill": prefilled - began, "decode": time.perf_counter() - prefilled}
        rows = [Completion.of(self, row, *host) for row in range(len(self.prompts))]
        return result_of(self, rows, seconds)

    def plain(self) -> "Job":
        """The same request decoded plainly: by the target alone, one token a step."""
        decoder = dataclasses.replace(self.decoder, drafter=NoDraft(), num_speculative_tokens=0)
        return dataclasses.replace(self, decoder=decoder)

    def stream(self) -> Stream:
        """The same token by token: iterate over the events; ``.result()`` gives the record at any time."""
        return Stream(self)

    def memory(self) -> dict[str, int]:
        """Bytes of each part, by :func:`specjax.measure.memory.report`. Nothing is allocated or compiled."""
        from specjax.measure import memory

        return memory.report(self)
