"""What a request asks of the engine, whichever endpoint it came to."""

import dataclasses
import secrets
from typing import Any

from specjax.engine.engine import Engine
from specjax.server.errors import RefusedError
from specjax.server.parameters import MAX_CHOICES, Sampling


@dataclasses.dataclass(frozen=True)
class Work:
    """A checked request. Choice i of it continues prompt i // n, with seed + i."""

    # The token ids of each prompt.
    prompts: list[list[int]]
    # The number of choices of each prompt.
    n: int
    # The first choice's seed.
    seed: int
    # Options of ``Engine.submit``, the same for all choices.
    options: dict[str, Any]
    # Requests with different salts share no pages of the prefix cache.
    salt: str
    # The stop strings.
    stops: tuple[str, ...]
    # The texts that stand before the completions; None: the completions alone are wanted.
    echo: list[str] | None = None

    @property
    def choices(self) -> int:
        """The number of choices."""
        return len(self.prompts) * self.n

    @property
    def logprobs(self) -> int | None:
        """How many of the likeliest tokens are wanted at each position. None: no log-probabilities at all."""
        asked = self.options["logprobs"]
        return None if asked is False else asked


def work_of(
    engine: Engine,
    body: Sampling,
    prompts: list[list[int]],
    max_tokens: int | None,
    logprobs: int | None,
    key_salt: str,
    echo: list[str] | None = None,
) -> Work:
    """The checked request.

    Args:
      engine: the engine.
      body: the request's fields.
      prompts: the token ids of each prompt.
      max_tokens: the largest number of new tokens; None: as many as the engine has room for.
      logprobs: as ``Work.logprobs``.
      key_salt: differs between clients whose prompts must not share cache pages.
      echo: as ``Work.echo``.

    Raises:
      RefusedError: the request asks for too many choices, tokens or log-probabilities.
    """
    n = 1 if body.n is None else body.n
    if n * len(prompts) > MAX_CHOICES:
        raise RefusedError(400, f"prompts times n must be at most {MAX_CHOICES}, got {n * len(prompts)}", "n")
    if logprobs is not None and logprobs > engine.max_logprobs:
        message = f"this server gives at most {engine.max_logprobs} log-probabilities at each position, got {logprobs}"
        raise RefusedError(400, message, "logprobs")
    field = "prompt" if "prompt" in type(body).model_fields else "messages"
    for prompt in prompts:
        check_length(engine, field, len(prompt), max_tokens)
    options = {
        **_sampling(body),
        **_stops(engine, body),
        "max_new_tokens": max_tokens,
        "logprobs": False if logprobs is None else logprobs,
    }
    seed = secrets.randbits(52) if body.seed is None else body.seed
    salt = f"{key_salt}/{body.cache_salt or ''}"
    return Work(prompts, n, seed, options, salt, tuple(options["stop"] or ()), echo)


def check_length(engine: Engine, field: str, length: int, max_tokens: int | None) -> None:
    """Raises RefusedError if the engine has no room for ``length`` tokens of a prompt and ``max_tokens`` new ones.

    ``field`` is the request's field that holds the prompt.
    """
    asked = length + (1 if max_tokens is None else max_tokens)
    if length >= engine.longest or asked > engine.longest:
        new = "at least 1 new token" if max_tokens is None else f"{max_tokens} new tokens"
        raise RefusedError(
            400,
            f"this server's maximum context length is {engine.longest} tokens, but the request needs {asked}: "
            f"{length} of the prompt and {new}; shorten the prompt or lower max_tokens",
            field if length >= engine.longest or max_tokens is None else "max_tokens",
            "context_length_exceeded",
        )


def _sampling(body: Sampling) -> dict[str, Any]:
    """The sampling options. A field that the client left out has OpenAI's default: temperature 1, all else off."""
    bias = body.logit_bias
    return {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "min_new_tokens": body.min_tokens,
        "logit_bias": {int(token): amount for token, amount in bias.items()} if bias else None,
    }


def _stops(engine: Engine, body: Sampling) -> dict[str, Any]:
    """The options that say where a completion ends."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    ends: dict[str, Any] = {"stop": stop or None, "ignore_eos": bool(body.ignore_eos)}
    if body.stop_token_ids:  # the engine takes these in place of the model's own, so both are given
        own = [] if body.ignore_eos else list(engine.lm.config.eos_token_ids)
        ends |= {"eos_token_id": [*own, *body.stop_token_ids], "ignore_eos": False}
    return ends
