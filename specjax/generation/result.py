"""What ``generate`` returns and ``stream`` yields."""

import dataclasses

from specjax.generation.metrics import Metrics


@dataclasses.dataclass(frozen=True)
class Result:
    """What was generated; entry i of every list belongs to prompt i."""

    tokens: list[list[int]]  # new tokens, a stop token included
    texts: list[str] | None  # their text without special tokens; None if the model has no tokenizer
    finish_reasons: list[str | None]  # "stop" (stop token or stop string), "length"; None: the stream was left early
    metrics: list[Metrics]
    logprobs: list[list[float]] | None  # natural log, under the model's raw logits; None unless asked for
    prompt_tokens: list[list[int]]
    stop_token_ids: list[int]  # a row ends at these
    date: str | None  # the date that the chat template was told; None: the template asked for none
    seconds: dict[str, float]  # wall time of "prefill" and "decode", with compilation unless ``warmup`` came first
    seeds: list[int] = dataclasses.field(default_factory=list)  # with these the rows can be replayed
    # For each token the likeliest ones at its position, (id, log-probability) pairs; None unless asked for.
    top_logprobs: list[list[list[tuple[int, float]]]] | None = None


@dataclasses.dataclass(frozen=True)
class Event:
    """One token of a stream."""

    row: int
    token: int
    text: str  # what this token adds; "" while a character is incomplete
    from_draft: bool  # drafted and accepted, or the target's own
    finish_reason: str | None  # set on a row's last token
    origin: str  # "accepted", "correction", "bonus" or "plain": as of Metrics.origins
    logprob: float | None = None  # as in ``Result``; None unless asked for
    top_logprobs: list[tuple[int, float]] | None = None


class NoDistributionError(ValueError):
    """A row was left without any token of finite logit; ``result`` holds what was generated until then."""

    def __init__(self, message: str, result: Result):
        super().__init__(message)
        self.result = result
