"""A checked request, ready for the compiled functions. Its methods do not check the request again."""

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
from specjax.models import axes


@dataclasses.dataclass(frozen=True)
class Job:
    """One batch of prompts and how to decode them. :func:`specjax.prepare` makes it."""

    # The target, drafter, verifier and K.
    decoder: Decoder
    # The token ids of each prompt: with an encoder those of the source, then the first token of the decoder.
    prompts: list[list[int]]
    # The request of each row.
    request: Request
    # i32[B, L] The prompts, padded to the capacity L, in a NumPy array.
    tokens: Any
    # The number of tokens that one call of the target reads during prefill.
    chunk: int
    # The options as the user gave them, with the seed of each row and the date filled in.
    options: Options

    def start(self, request: Request | None = None) -> DecodeState:
        """The state after the prompts are read. ``request``, if given, is used in place of the job's own request."""
        request = self.request if request is None else request
        return self.decoder.start(request, self.tokens, self.chunk, logprobs=logprobs.wanted(self.options.logprobs))

    def compile(self, streaming: bool = False) -> None:
        """Compiles prefill and rounds, and runs nothing. Several jobs may compile at once, each in a thread.

        Args:
          streaming: whether to compile for :meth:`stream` in place of :meth:`generate`.
        """
        compiled.lower_rounds(self.decoder, self.compile_start(), streaming)

    def compile_start(self) -> Any:
        """Compiles prefill alone, and runs nothing. -> the shapes of the state after prefill."""
        asked = logprobs.wanted(self.options.logprobs)
        return compiled.lower_start(self.decoder, self.request, self.tokens, self.chunk, asked)

    def warmup(self, streaming: bool = False) -> None:
        """Compiles the programs that :meth:`generate` will run, and runs one block.

        The first run of a compiled program is slow too, because it loads kernels and touches the weights for the first
        time. The block follows the first two tokens of each prompt. Two tokens are enough, because the programs do not
        depend on the length of the prompts.

        Args:
          streaming: whether to compile for :meth:`stream` in place of :meth:`generate`.
        """
        lengths = jnp.minimum(self.request.prompt_lengths, 2)
        limit = jnp.minimum(self.request.limit, lengths + self.decoder.num_speculative_tokens + 2)
        state = self.start(self.request._replace(prompt_lengths=lengths, limit=limit))
        by_round = streaming or bool(stop_strings(self.options))
        state = self.decoder.round(state)[0] if by_round else self.decoder.run(state)
        jax.block_until_ready(state.lengths)

    def generate(self) -> Result:
        """Decodes all prompts together. The whole loop runs on the device, unless there are stop strings.

        Raises:
          NoDistributionError: no token of a row has a finite logit.
        """
        if stop_strings(self.options):  # only the host can look for strings
            rounds = self.stream()
            for _ in rounds:
                pass
            return rounds.result()
        began = time.perf_counter()
        state = self.start()
        jax.block_until_ready(state.lengths)
        prefilled = time.perf_counter()
        state = self.decoder.run(state)
        found = state.tokens, state.lengths, state.failed, state.history
        host = axes.on_host(found, self.decoder.target.mesh)
        seconds = {"prefill": prefilled - began, "decode": time.perf_counter() - prefilled}
        rows = [Completion.of(self, row, *host) for row in range(len(self.prompts))]
        return result_of(self, rows, seconds)

    def plain(self) -> "Job":
        """The same request for plain decoding: the target alone generates one token in each step."""
        decoder = dataclasses.replace(self.decoder, drafter=NoDraft(), num_speculative_tokens=0)
        return dataclasses.replace(self, decoder=decoder)

    def stream(self) -> Stream:
        """Decodes like :meth:`generate`, but gives each token as soon as its round ends.

        Returns:
          An iterator over events, one for each token. Its method ``result()`` gives the result so far at any time.
        """
        return Stream(self)

    def memory(self) -> dict[str, int]:
        """Bytes that each part of the job takes, by :func:`specjax.measure.memory.report`.

        Nothing is allocated or compiled.
        """
        from specjax.measure import memory

        return memory.report(self)
