"""From what a user writes to the arrays of a :class:`specjax.types.Request`, with every check, on the host."""

import dataclasses
import difflib
import math
import secrets
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import known_ids, random
from specjax.chat import is_conversation
from specjax.models.lm import LM
from specjax.numeric import (
    LARGEST_FLOAT,
    SMALLEST_FLOAT,
    STRONGEST,
    STRONGEST_REPETITION,
    Number,
    in_range,
    integer,
    is_int,
    is_real,
    per_row,
    real,
)
from specjax.sampling import EarlyStops, SamplingParams
from specjax.stops import stop_ids
from specjax.types import Request


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


MIN_TEMPERATURE = 1e-5


def encode_prompts(
    lm: LM,
    prompts: Any,
    chat: bool,
    parse_special: bool | None = None,
    tools: Sequence[Any] | None = None,
    date: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[list[int]]:
    """Token ids of each prompt; the arguments are those of :class:`Options`.

    Raises:
      ValueError: no prompt, an empty one, a type other than str, conversation or list of ids, an id outside the
        vocabulary, text without a tokenizer, text that isn't Unicode, ``chat`` with token ids, or arguments of the chat
        template without a chat.
    """
    if parse_special not in (None, False, True):
        raise ValueError(f"parse_special must be True, False or None, got {parse_special!r}")
    prompts = listed(prompts)
    template = {"tools": tools, "date": date, "chat_template_kwargs": chat_template_kwargs}
    template = {name: value for name, value in template.items() if value is not None}
    if template and not (chat or any(map(is_conversation, prompts))):
        raise ValueError(f"{', '.join(template)} is for the chat template; pass chat=True, or conversations as prompts")
    encoded = []
    for row, prompt in enumerate(prompts):
        if isinstance(prompt, str) or is_conversation(prompt):
            ids = _text_ids(lm, row, prompt, chat or not isinstance(prompt, str), parse_special, template)
        elif isinstance(prompt, Sequence | np.ndarray) and all(is_int(token) for token in prompt):
            if chat:
                raise ValueError(f"chat=True needs text prompts, but prompt {row} is a list of token ids")
            ids = [int(token) for token in prompt]
        else:
            raise ValueError(
                f"prompt {row} must be a string, a conversation or a list of token ids, got {prompt!r}"
                + ("; for one prompt of token ids pass [[...]]" if is_int(prompt) else "")
            )
        _check_ids(lm, row, ids)
        encoded.append(ids)
    return encoded


def _text_ids(lm: LM, row: int, prompt: Any, chat: bool, parse_special: bool | None, template: dict) -> list[int]:
    """Token ids of a text or conversation. Raises ValueError, naming the prompt."""
    if lm.tokenizer is None:
        raise ValueError(f"prompt {row} is text, but the model has no tokenizer; pass token ids")
    if not prompt:
        raise ValueError(f"prompt {row} is empty; to start from nothing but a BOS token, pass [[its id]]")
    switch = {} if parse_special in (None, not chat) else {"parse_special": parse_special}
    try:
        return lm.tokenizer.apply_chat_template(prompt, **template, **switch) if chat else (
            lm.tokenizer.encode(prompt, **switch)
        )
    except ValueError as e:
        raise ValueError(f"prompt {row}: {e}") from e


def listed(prompts: Any) -> list:
    """One prompt, or several, as a list. Raises ValueError if there is none."""
    if isinstance(prompts, str) or is_conversation(prompts):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray) or len(prompts) == 0:
        raise ValueError(
            "prompts must be a string, a conversation (a list of messages), or a list of strings, conversations or "
            f"token-id lists, got {prompts!r}"
        )
    return list(prompts)


def _check_ids(lm: LM, row: int, ids: list[int]) -> None:
    """Raises ValueError for a prompt that the model can't read."""
    if not ids:
        raise ValueError(f"prompt {row} is empty; at least one token is needed to condition on")
    outside = [token for token in ids if not 0 <= token < lm.config.vocab_size]
    if outside:
        text = "" if lm.tokenizer is None else f" ({lm.tokenizer.token_str(outside[0])!r})"
        raise ValueError(
            f"prompt {row} has token id {outside[0]}{text}, outside the model's vocabulary of {lm.config.vocab_size}"
        )
    if len(ids) > lm.config.max_position_embeddings:
        raise ValueError(
            f"prompt {row} has {len(ids)} tokens, more than the model's context of "
            f"{lm.config.max_position_embeddings}; shorten it"
        )


def build(lm: LM, prompts: list[list[int]], options: Options, headroom: int) -> tuple[Request, int]:
    """The request's arrays and the prefill chunk.

    Args:
      lm: the target.
      prompts: token ids, from :func:`encode_prompts`.
      options: the caller's.
      headroom: tokens past the limit that a round may write: those of its widest block.

    Raises:
      ValueError: naming the option, the value got and the values expected.
    """
    batch, vocab = len(prompts), lm.config.vocab_size
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    limits = lengths + _new_tokens(options.max_new_tokens, batch)
    _check_least(options, batch)
    limits = np.minimum(limits, lm.config.max_position_embeddings).astype(np.int32)
    capacity, chunk = _capacity(lm, options.capacity, int(lengths.max()), int(limits.max()), headroom)
    tokens = np.zeros((batch, capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    stops = stop_ids(lm, options, batch)
    known = None if options.allow_unknown_ids else known_ids.known_ids(lm, stops[0])
    request = Request(
        key=random.request_keys(seeds(options.seed, batch)),
        sampling=sampling_params(options, batch, vocab, known, stops),
        stop_ids=jnp.asarray(stops),
        limit=jnp.asarray(limits),
        prompt_lengths=jnp.asarray(lengths),
        tokens=jnp.asarray(tokens),
    )
    return request, chunk


def _capacity(lm: LM, asked: Any, longest: int, limit: int, headroom: int) -> tuple[int, int]:
    """Tokens that a row has room for, and the prefill chunk, which divides them."""
    needed = limit + headroom
    if asked is not None:
        if not (is_int(asked) and asked >= needed):
            raise ValueError(
                f"capacity must be an integer of at least {needed}: prompt, max_new_tokens, and {headroom} for a block "
                f"of drafted tokens and one more; got {asked!r}"
            )
        longest = needed = min(int(asked), lm.config.max_position_embeddings + headroom)  # no text is longer
    chunk = prefill_chunk(longest)
    return bucket(needed, chunk), chunk


def bucket(needed: int, multiple: int) -> int:
    """Capacity for ``needed`` tokens: a power of two, or one and a half, so that few programs serve all lengths."""
    size = 128
    while size < needed:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return -(-size // multiple) * multiple


def prefill_chunk(longest: int) -> int:
    """Tokens per prefill call. A CPU is compute-bound early and pays for padding; a GPU wants large products."""
    if jax.default_backend() == "cpu":
        return 64
    return min(512, max(64, 1 << (longest - 1).bit_length()))


NUMBERS = {
    "temperature": real(0.0, 0, STRONGEST),
    "top_k": integer(-1, " (0 and -1 are off)"),
    "top_p": Number(
        1.0, jnp.float32, lambda p: in_range(p, 0, 1) and p > 0, "a number above 0 and at most 1", low=SMALLEST_FLOAT
    ),
    "min_p": real(0.0, 0, 1),
    "repetition_penalty": real(1.0, 1 / STRONGEST_REPETITION, STRONGEST_REPETITION),
    "presence_penalty": real(0.0, -STRONGEST, STRONGEST),
    "frequency_penalty": real(0.0, -STRONGEST, STRONGEST),
    "no_repeat_ngram_size": integer(0, " (0 is off)"),
    "min_new_tokens": integer(0, " (0 is off)"),
}


def sampling_params(
    options: Options, batch: int, vocab: int, known: np.ndarray | None = None, stop_ids: np.ndarray | None = None
) -> SamplingParams:
    """Checks and packs the sampling options; transforms that no row uses stay None.

    Args:
      options: the caller's.
      batch: B.
      vocab: V.
      known: bool[V], the ids that may be generated at all; None: every id.
      stop_ids: i32[B, E], padded with NO_TOKEN; ``min_new_tokens`` forbids them. None: there are none.

    Raises:
      ValueError: naming the option, the value got and the values expected.
    """
    values = {name: number.array(name, getattr(options, name), batch) for name, number in NUMBERS.items()}
    temperature, top_k, least = (values.pop(name) for name in ("temperature", "top_k", "min_new_tokens"))
    if temperature is None:
        raise ValueError(f"temperature must be {NUMBERS['temperature'].expected}, got None")
    return SamplingParams(
        temperature=jnp.where(temperature < MIN_TEMPERATURE, 0.0, temperature),
        top_k=None if top_k is None else jnp.where(top_k <= 0, vocab, jnp.minimum(top_k, vocab)),
        logit_bias=_logit_bias(options.logit_bias, batch, vocab),
        allowed=_allowed(options.allowed_token_ids, batch, vocab, known),
        min_new_tokens=None if least is None or stop_ids is None else EarlyStops(least, jnp.asarray(stop_ids)),
        **values,
    )


def _new_tokens(value: Any, batch: int) -> np.ndarray:
    values = per_row("max_new_tokens", value, batch)
    for v in values:
        if v is not None and not (is_int(v) and v >= -1):
            raise ValueError(
                f"max_new_tokens must be an integer >= 0, or None or -1 for up to the model's context, got {v!r}"
            )
    unlimited = 1 << 30
    return np.array([unlimited if v is None or v == -1 else min(v, unlimited) for v in values], np.int64)


def _check_least(options: Options, batch: int) -> None:
    """Raises ValueError if a row must have more new tokens than it may."""
    bounds = (per_row(name, getattr(options, name), batch) for name in ("min_new_tokens", "max_new_tokens"))
    for row, (least, most) in enumerate(zip(*bounds, strict=True)):
        if is_int(least) and most is not None and 0 <= most < least:
            raise ValueError(f"min_new_tokens must be at most max_new_tokens, got {least} and {most} in row {row}")


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


def _logit_bias(value: Any, batch: int, vocab: int) -> jax.Array | None:
    rows = per_row("logit_bias", value, batch)
    if all(row is None for row in rows):
        return None
    bias = np.zeros((batch, vocab), np.float32)
    for row, entries in enumerate(rows):
        for token, amount in (entries or {}).items():
            if not (is_int(token) and 0 <= token < vocab):
                raise ValueError(f"logit_bias maps token ids below {vocab} to numbers, got {token!r}: {amount!r}")
            if not (in_range(amount, -LARGEST_FLOAT, STRONGEST) or (is_real(amount) and amount == -math.inf)):
                raise ValueError(
                    f"logit_bias must be numbers from -3.4e38 to {STRONGEST:g}, or -inf to forbid a token, got "
                    f"{token!r}: {amount!r}"
                )
            bias[row, token] = amount
    return jnp.asarray(bias)


def _allowed(value: Any, batch: int, vocab: int, known: np.ndarray | None) -> jax.Array | None:
    one_list_for_all = isinstance(value, list | tuple | set | frozenset) and all(is_int(v) for v in value)
    rows = [value] * batch if one_list_for_all else per_row("allowed_token_ids", value, batch)
    if known is None and all(row is None for row in rows):
        return None
    allowed = np.zeros((batch, vocab), bool)
    for row, ids in enumerate(rows):
        ids = range(vocab) if ids is None else list(ids)
        if not ids or not all(is_int(token) and 0 <= token < vocab for token in ids):
            raise ValueError(
                f"allowed_token_ids of row {row} must be at least one id below {vocab}, got {ids!r}: nothing could be "
                "generated"
            )
        allowed[row, list(ids)] = True
        if known is not None:
            allowed[row] &= known
            if not allowed[row].any():
                raise ValueError(
                    f"allowed_token_ids of row {row} must hold an id that the tokenizer has, got {ids!r}; "
                    f"{known_ids.ALLOW}"
                )
    return jnp.asarray(allowed)


def options_of(given: dict[str, Any]) -> Options:
    """The options by name. Raises ValueError for an unknown name, with the nearest known one."""
    known = [field.name for field in dataclasses.fields(Options)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
            meant = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"{name!r} is no option{meant}; the options are the fields of specjax.Options")
    return Options(**given)


def on_host(prompts: Any) -> Any:
    """The same prompts with numbers and lists in place of JAX arrays."""
    if isinstance(prompts, jax.Array):
        return np.asarray(prompts).tolist()
    return [on_host(prompt) for prompt in prompts] if isinstance(prompts, list | tuple) else prompts
