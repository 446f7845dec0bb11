"""Turns what a user asks of an engine into tickets, with every check."""

import secrets
from typing import TYPE_CHECKING, Any

from specjax.decode.numeric import is_int
from specjax.engine import sizes
from specjax.engine.pages import prefix_keys
from specjax.engine.saved import Samples
from specjax.engine.ticket import Ticket, job_for, with_seed
from specjax.generation.options import asked, seeds

if TYPE_CHECKING:
    from specjax.engine.engine import Engine

# The options that the engine fixes for all its requests.
FIXED = ("drafter", "verifier", "num_speculative_tokens", "block_width", "lossy", "capacity")


def tickets_of(
    engine: "Engine", prompt: Any, n: int, priority: int, cache_salt: str, given: dict[str, Any]
) -> list[Ticket]:
    """The request, once for each of ``n`` samples. Raises ValueError as :meth:`Engine.submit_many`."""
    fixed = [name for name in FIXED if name in given]
    if fixed:
        raise ValueError(
            f"{', '.join(fixed)} can't be given for one request: the engine has one value for all, which is an "
            "argument of specjax.Engine"
        )
    if not (is_int(n) and 1 <= n <= engine.max_waiting):
        raise ValueError(f"n must be an integer from 1 to max_waiting, which is {engine.max_waiting}, got {n!r}")
    if not is_int(priority):
        raise ValueError(f"priority must be an integer, got {priority!r}")
    if not isinstance(cache_salt, str):
        raise ValueError(f"cache_salt must be a string, got {cache_salt!r}")
    job = job_for(engine.lm, prompt, asked({**engine.fixed, **given}))
    if job.decoder.top_logprobs > engine.max_logprobs:
        raise ValueError(
            f"logprobs must be at most {engine.max_logprobs} in this engine, got {job.decoder.top_logprobs}; "
            "specjax.Engine(max_logprobs=...) allows more"
        )
    job = sizes.within(job, "max_new_tokens" in given, engine.longest, engine.capacity, engine.kv_tokens)
    (seed,) = job.options.seed  # type: ignore[misc]
    # Without a prefix cache only the samples of one request share pages.
    salt = cache_salt if engine.prefix_cache else secrets.token_hex()
    keys = prefix_keys(job.prompts[0], salt) if engine.prefix_cache or n > 1 else []
    samples = Samples()
    return [Ticket(with_seed(job, one), engine.limits, priority, keys, samples) for one in seeds(seed, n)]
