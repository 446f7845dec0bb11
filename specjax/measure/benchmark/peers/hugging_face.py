"""Hugging Face transformers: ``generate``, plain and assisted by the draft model, and its continuous batching."""

import logging
import time
from typing import Any

from specjax.measure.benchmark.case import Case
from specjax.measure.benchmark.peers import Decoded, weights
from specjax.models.config import to_hf
from specjax.models.lm import LM


class Transformers:
    """transformers as a peer."""

    def __init__(self):
        self.torch, self.package = weights.imported("torch"), weights.imported("transformers")
        self.name = f"transformers {self.package.__version__}, torch {self.torch.__version__.split('+')[0]}"
        self.package.logging.set_verbosity_error()  # assisted generation warns of its own arguments
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)  # so does continuous batching
        self.target: Any = None
        self.draft: Any = None

    def load(self, case: Case) -> None:
        self.take(case.target, case.draft)

    def take(self, target: LM, draft: LM | None) -> None:
        """Takes over the weights of a target, and of a draft model if there is one.

        Raises:
          ValueError: a model is no Llama.
        """
        self.target, self.draft = self.model(target), None if draft is None else self.model(draft)

    def model(self, lm: LM) -> Any:
        """transformers' Llama on the weights of ``lm``, which stay where they are.

        Raises:
          ValueError: the model is no Llama, or transformers has other names for the tensors.
        """
        if lm.config.model_type != "llama":
            raise ValueError(f"transformers as a peer runs models of the type llama, got {lm.config.model_type}")
        state = weights.tensors(lm)
        some = state["model.norm.weight"]
        given = {name: value for name, value in to_hf(lm.config).items() if name != "model_type"}
        config = self.package.LlamaConfig(**given, pad_token_id=0)
        with self.torch.device(some.device):
            model = self.package.AutoModelForCausalLM.from_config(config, dtype=some.dtype)
        missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"transformers names other tensors: missing {missing}, unexpected {unexpected}")
        model.tie_weights()
        return model.eval().requires_grad_(False)

    def assisted(self, size: int) -> dict[str, Any]:
        """The settings of ``generate`` with which the draft model always drafts ``size`` tokens."""
        settings = self.draft.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = size, "constant"
        settings.assistant_confidence_threshold = 0.0
        return {"assistant_model": self.draft}

    def call(self, prompt: list[int], count: int, **settings: Any) -> tuple[list[int], "Clock"]:
        """At most ``count`` new tokens after the prompt by ``generate``, and the clock of the target calls."""
        ids, clock = self.torch.tensor([prompt], device=self.target.device), Clock()
        out = self.target.generate(
            ids, attention_mask=self.torch.ones_like(ids), max_new_tokens=count, streamer=clock, **settings
        )
        return out[0, len(prompt) :].tolist(), clock

    def decode(self, prompt: list[int], count: int, size: int) -> Decoded:
        helper = self.assisted(size) if size else {}
        tokens, clock = self.call(prompt, count, do_sample=False, **helper)
        # The streamer gets the prompt first, before any call. The first call reads the prompt and is not timed.
        times, counts = clock.times[1:], clock.counts[1:]
        return Decoded(tokens, sum(counts[1:]), times[-1] - times[0], len(times) - 1)

    def batch(self, prompts: list[list[int]], count: int) -> tuple[list[list[int]], float]:
        settings = self.package.GenerationConfig(
            max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        for _ in range(2):  # the first call makes a manager for so many requests, and the second call finds it warm
            began = time.perf_counter()
            found = self.target.generate_batch(prompts, settings, progress_bar=False, persistent_manager=True)
            seconds = time.perf_counter() - began
        self.target.destroy_cached_continuous_batching_manager()
        of_prompts = {tuple(one.prompt_ids): one.generated_tokens for one in found.values()}
        return [of_prompts[tuple(prompt)] for prompt in prompts], seconds

    def free(self) -> None:
        self.target = self.draft = None
        weights.free()


class Clock:
    """A streamer that keeps, for each target call, the time at which its tokens were on the host, and their number."""

    def __init__(self):
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass
