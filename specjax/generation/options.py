"""The options of ``generate`` and ``stream``."""

import dataclasses
import difflib
import secrets
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.decode.numeric import is_int, per_row


@dataclasses.dataclass(frozen=True)
class Options:
    """How to generate. Every sampling parameter is one value, or a list of one value a row (None: off)."""

    drafter: Any = None  # None (plain decoding), "ngram", or an object of specjax.drafters
    verifier: Any = "rejection"  # "rejection", "coupled", or an object of specjax.verify
    num_speculative_tokens: int = 5  # K; 0 is plain decoding
    max_new_tokens: int | None | Sequence[int | None] = 128  # None or -1: up to the model's context; 0: nothing
    # Before so many new tokens no stop token is generated, and no stop string counts.
    min_new_tokens: int | None | Sequence[int | None] = None
    temperature: float | Sequence[float] = 0.0  # 0 is greedy; below MIN_TEMPERATURE counts as 0
    top_k: int | None | Sequence[int | None] = None  # 0 and -1 are off
    top_p: float | None | Sequence[float | None] = None
    min_p: float | None | Sequence[float | None] = None
    repetition_penalty: float | None | Sequence[float | None] = None  # over prompt and output
    presence_penalty: float | None | Sequence[float | None] = None  # over the output
    frequency_penalty: float | None | Sequence[float | None] = None  # over the output
    no_repeat_ngram_size: int | None | Sequence[int | None] = None  # over prompt and output
    logit_bias: dict[int, float] | None | Sequence[dict[int, float] | None] = None
    allowed_token_ids: Sequence[int] | None | Sequence[Sequence[int] | None] = None
    allow_unknown_ids: bool = False  # whether ids that the tokenizer lacks may be generated and stand in prompts
    stop: str | Sequence[str] | None = None  # text or special token that ends a row; kept, as in Hugging Face
    eos_token_id: int | Sequence[int] | None = None  # replaces the model's own, lm.config.eos_token_ids
    ignore_eos: bool = False
    seed: int | None | Sequence[int | None] = 0  # below 2^64; row i uses seed + i, or its own entry; None: a fresh one
    chat: bool = False  # wrap each text prompt as a user's turn in the model's chat template; conversations always are
    tools: Sequence[Any] | None = None  # for the chat template: JSON schemas, or Python functions with docstrings
    chat_template_kwargs: dict[str, Any] | None = None  # further variables of the chat template
    date: str | None = None  # ISO date for a chat template that asks for the present; None: today
    parse_special: bool | None = None  # control strings in prompts are tokens; None: in plain text but not in messages
    lossy: bool = False  # admits verifiers that change the output's distribution
    # Also return each token's log-probability under the model's raw logits; a number: and those of so many best tokens.
    logprobs: bool | int = False
    capacity: int | None = None  # room for at least so many tokens: calls of one capacity share a program


def options_of(given: dict[str, Any]) -> Options:
    """The options by name. Raises ValueError for an unknown name, with the nearest known one."""
    known = [field.name for field in dataclasses.fields(Options)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"{name!r} is no option{meant}; the options are the fields of specjax.Options")
    return Options(**given)


def seeds(seed: Any, batch: int) -> list[int]:
    """One seed a row, all of whose 64 bits count; a fresh random one where it is None.

    Raises:
      ValueError: no integer from 0 to 2^64 - 1.
    """
    given = [seed + row for row in range(batch)] if is_int(seed) else per_row("seed", seed, batch)
    drawn = [secrets.randbits(53) if one is None else one for one in given]  # JSON's numbers hold 53 bits exactly
    if not all(is_int(one) and 0 <= one < 1 << 64 for one in drawn):
        raise ValueError(
            f"seed must be an integer from 0 to 2^64 - 1, None for a fresh one, or a list of one a prompt, got {seed!r}"
            + (f"; prompt i of {batch} has seed + i" if is_int(seed) and batch > 1 else "")
        )
    return [int(one) for one in drawn]


def filters_without_effect(options: Options) -> list[str]:
    """Names of the options that choose among likely tokens and do nothing at temperature 0, if a row uses them."""
    off: dict[str, tuple] = {"top_p": (None, 1), "top_k": (None, 0, -1), "min_p": (None, 0)}
    return [name for name, values in off.items() if any(v not in values for v in np.ravel(getattr(options, name)))]


def asked(given: dict[str, Any]) -> Options:
    """The options by name; warns of filters that do nothing because no temperature is given.

    Raises:
      ValueError: as :func:`options_of`.
    """
    options = options_of(given)
    unused = [] if "temperature" in given else filters_without_effect(options)
    if unused:
        warnings.warn(
            f"{' and '.join(unused)} without a temperature: decoding is greedy, so there is nothing to choose among; "
            "pass temperature=1.0 to sample, or temperature=0.0 to say that greedy decoding is meant",
            stacklevel=3,
        )
    return options
