"""The values that a user gets back: a ``Result`` from ``generate``, and ``Event``s from ``stream``."""

import dataclasses

from specjax.generation.metrics import Metrics


@dataclasses.dataclass(frozen=True)
class Result:
    """The output of all prompts. In a list with one entry for each prompt, entry i belongs to prompt i.

    Of beam search there are n entries for each prompt, n = ``num_return_sequences``: entries i * n to i * n + n - 1
    belong to prompt i, the best first. Their ``metrics`` are those of the prompt's search, in which one token is one
    step of all beams.
    """

    # The new tokens of each prompt. A stop token is included.
    tokens: list[list[int]]
    # The text of the new tokens, without special tokens. None if the model has no tokenizer.
    texts: list[str] | None
    # Why each row ended: "stop" (a stop token or a stop string) or "length". None: the stream was left early.
    finish_reasons: list[str | None]
    # How many tokens were drafted and accepted, for each prompt.
    metrics: list[Metrics]
    # The natural logarithm of each new token's probability under the model's raw logits. None unless asked for.
    logprobs: list[list[float]] | None
    # The token ids of each prompt: with an encoder those of the source, then the first token of the decoder.
    prompt_tokens: list[list[int]]
    # The tokens that end a row, the same for all prompts.
    stop_token_ids: list[int]
    # The date that the chat template was given, in ISO format. None: no template asked for a date.
    date: str | None
    # The wall time of "prefill" and of "decode" in seconds. Compilation is included unless ``warmup`` was called.
    seconds: dict[str, float]
    # The seed of each row. The same seed gives the same row again.
    seeds: list[int] = dataclasses.field(default_factory=list)
    # For each new token, the likeliest tokens at its position as (id, log-probability) pairs. None unless asked for.
    top_logprobs: list[list[list[tuple[int, float]]]] | None = None
    # The score of each text of beam search: its log-probability over (its number of new tokens) ** length_penalty. None
    # without beam search.
    scores: list[float] | None = None


@dataclasses.dataclass(frozen=True)
class Event:
    """One token of a stream."""

    # The index of the prompt.
    row: int
    # The token's id.
    token: int
    # The text that this token adds. "" while a character is incomplete.
    text: str
    # Whether the token was drafted and accepted. False: the token is the target's own.
    from_draft: bool
    # "stop" or "length" on the row's last token, else None.
    finish_reason: str | None
    # Where the token comes from: "accepted", "correction", "bonus" or "plain", as in ``Metrics.origins``.
    origin: str
    # The token's log-probability, as in ``Result.logprobs``. None unless asked for.
    logprob: float | None = None
    # The likeliest tokens at this position, as in ``Result.top_logprobs``. None unless asked for.
    top_logprobs: list[tuple[int, float]] | None = None


class NoDistributionError(ValueError):
    """No token of a row had a finite logit. ``result`` holds the tokens that were generated before."""

    def __init__(self, message: str, result: Result):
        super().__init__(message)
        self.result = result
