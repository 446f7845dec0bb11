"""From what a user writes to the arrays of a :class:`specjax.types.Request`, with every check, on the host."""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import random
from specjax.models.lm import LM
from specjax.sampling import NO_TOKEN, SamplingParams
from specjax.types import Request


@dataclasses.dataclass(frozen=True)
class Options:
    """How to generate. Every sampling parameter is one value, or a list of one value a row (None: off)."""

    drafter: Any = None  # None (plain decoding), "ngram", or an object of specjax.drafters
    verifier: Any = "rejection"  # "rejection", "coupled", or an object of specjax.verify
    num_speculative_tokens: int = 5  # K; 0 is plain decoding
    max_new_tokens: int | None | Sequence[int | None] = 128  # None or -1: up to the model's context; 0: nothing
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
    stop: str | Sequence[str] | None = None  # text that ends a row; kept in the output, as in Hugging Face
    eos_token_id: int | Sequence[int] | None = None  # None: the model's own
    ignore_eos: bool = False
    seed: int | Sequence[int] = 0  # row i uses seed + i, or its own entry
    chat: bool = False  # wrap each text prompt as a user's turn in the model's chat template
    lossy: bool = False  # admits verifiers that change the output's distribution
    logprobs: bool = False  # also return each token's log-probability under the model's raw logits
    capacity: int | None = None  # room for at least so many tokens: calls of one capacity share a program


MIN_TEMPERATURE = 1e-5


def encode_prompts(lm: LM, prompts: Any, chat: bool) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
      ValueError: no prompt, an empty one, a type other than str or list of ids, an id outside the vocabulary, text
        without a tokenizer, or ``chat`` with token ids.
    """
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Sequence | np.ndarray) or len(prompts) == 0:
        raise ValueError(f"prompts must be a string, a list of strings or a list of token-id lists, got {prompts!r}")
    encoded = []
    for row, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if lm.tokenizer is None:
                raise ValueError(f"prompt {row} is text, but the model has no tokenizer; pass token ids")
            if not prompt:
                raise ValueError(f"prompt {row} is empty; to start from nothing but a BOS token, pass [[its id]]")
            ids = lm.tokenizer.apply_chat_template(prompt) if chat else lm.tokenizer.encode(prompt)
        elif isinstance(prompt, Sequence | np.ndarray) and all(is_int(token) for token in prompt):
            if chat:
                raise ValueError(f"chat=True needs text prompts, but prompt {row} is a list of token ids")
            ids = [int(token) for token in prompt]
        else:
            raise ValueError(
                f"prompt {row} must be a string or a list of token ids, got {prompt!r}"
                + ("; for one prompt of token ids pass [[...]]" if is_int(prompt) else "")
            )
        if not ids:
            raise ValueError(f"prompt {row} is empty; at least one token is needed to condition on")
        outside = [token for token in ids if not 0 <= token < lm.config.vocab_size]
        if outside:
            raise ValueError(
                f"prompt {row} has token id {outside[0]}, outside the model's vocabulary of {lm.config.vocab_size}"
            )
        if len(ids) > lm.config.max_position_embeddings:
            raise ValueError(
                f"prompt {row} has {len(ids)} tokens, more than the model's context of "
                f"{lm.config.max_position_embeddings}; shorten it"
            )
        encoded.append(ids)
    return encoded


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
    limits = np.minimum(limits, lm.config.max_position_embeddings).astype(np.int32)
    needed = int(limits.max()) + headroom
    if options.capacity is None:
        chunk = prefill_chunk(int(lengths.max()))
    else:
        if not is_int(options.capacity) or options.capacity < needed:
            raise ValueError(
                f"capacity must be an integer of at least {needed}: prompt, max_new_tokens, and {headroom} for a block "
                f"of drafted tokens and one more; got {options.capacity!r}"
            )
        needed, chunk = int(options.capacity), prefill_chunk(int(options.capacity))
    capacity = bucket(needed, chunk)
    tokens = np.zeros((batch, capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    request = Request(
        key=random.request_keys(_seeds(options.seed, batch)),
        sampling=sampling_params(options, batch, vocab),
        stop_ids=jnp.asarray(_stop_ids(lm, options, batch)),
        limit=jnp.asarray(limits),
        prompt_lengths=jnp.asarray(lengths),
        tokens=jnp.asarray(tokens),
    )
    return request, chunk


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


def sampling_params(options: Options, batch: int, vocab: int) -> SamplingParams:
    """Checks and packs the sampling options; transforms that no row uses stay None."""

    def row_values(name, off, check, expected, dtype):
        values = _per_row(name, getattr(options, name), batch)
        if all(value is None for value in values):
            return None
        for row, value in enumerate(values):
            if value is not None and not check(value):
                raise ValueError(f"{name} must be {expected}, got {value!r}" + (f" in row {row}" if batch > 1 else ""))
        return jnp.asarray([off if value is None else value for value in values], dtype)

    def real(low, high=math.inf, open_low=False):
        return lambda v: _is_real(v) and math.isfinite(v) and (low < v if open_low else low <= v) and v <= high

    any_real = real(-math.inf)
    temperature = row_values("temperature", 0.0, real(0), "a finite number >= 0", jnp.float32)
    if temperature is None:
        raise ValueError("temperature must be a finite number >= 0, got None")
    top_k = row_values("top_k", 0, lambda v: is_int(v) and v >= -1, "an integer >= -1 (0 and -1 are off)", jnp.int32)
    ngram = row_values(
        "no_repeat_ngram_size", 0, lambda v: is_int(v) and v >= 0, "an integer >= 0 (0 is off)", jnp.int32
    )
    penalty = {
        name: row_values(name, 0.0, any_real, "a finite number", jnp.float32)
        for name in ("presence_penalty", "frequency_penalty")
    }
    return SamplingParams(
        temperature=jnp.where(temperature < MIN_TEMPERATURE, 0.0, temperature),
        top_k=None if top_k is None else jnp.where(top_k <= 0, vocab, jnp.minimum(top_k, vocab)),
        top_p=row_values("top_p", 1.0, real(0, 1, open_low=True), "a number above 0 and at most 1", jnp.float32),
        min_p=row_values("min_p", 0.0, real(0, 1), "a number from 0 to 1", jnp.float32),
        repetition_penalty=row_values(
            "repetition_penalty", 1.0, real(0, open_low=True), "a finite number above 0", jnp.float32
        ),
        no_repeat_ngram_size=ngram,
        logit_bias=_logit_bias(options.logit_bias, batch, vocab),
        allowed=_allowed(options.allowed_token_ids, batch, vocab),
        **penalty,
    )


def is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _per_row(name: str, value: Any, batch: int) -> list:
    """One value a row, of a single value or a list."""
    if isinstance(value, np.ndarray | jax.Array):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return [value] * batch
    if len(value) != batch:
        raise ValueError(f"{name} has {len(value)} values for {batch} prompts; give one value, or one a prompt")
    return list(value)


def _new_tokens(value: Any, batch: int) -> np.ndarray:
    values = _per_row("max_new_tokens", value, batch)
    for v in values:
        if v is not None and not (is_int(v) and v >= -1):
            raise ValueError(
                f"max_new_tokens must be an integer >= 0, or None or -1 for up to the model's context, got {v!r}"
            )
    unlimited = 1 << 30
    return np.array([unlimited if v is None or v == -1 else min(v, unlimited) for v in values], np.int64)


def _seeds(seed: Any, batch: int) -> np.ndarray:
    seeds = seed + np.arange(batch) if is_int(seed) else np.array(_per_row("seed", seed, batch))
    if seeds.dtype.kind not in "iu" or (seeds < 0).any():
        raise ValueError(f"seed must be an integer >= 0, or a list of one a prompt, got {seed!r}")
    return (seeds % (1 << 32)).astype(np.uint32)


def _stop_ids(lm: LM, options: Options, batch: int) -> np.ndarray:
    """i32[B, E], with E a multiple of 4 so that one more stop token seldom compiles anew."""
    given: Any = options.eos_token_id
    if options.ignore_eos:
        ids = []
    elif given is None:
        ids = list(lm.config.eos_token_ids)
    else:
        ids = list(given) if isinstance(given, list | tuple) else [given]
        for token in ids:
            if not (is_int(token) and 0 <= token < lm.config.vocab_size):
                raise ValueError(
                    f"eos_token_id must be an id below the vocabulary size {lm.config.vocab_size}, or a list of such, "
                    f"got {given!r}"
                )
    padded = np.full(max(4, -(-len(ids) // 4) * 4), NO_TOKEN, np.int32)
    padded[: len(ids)] = ids
    return np.tile(padded, (batch, 1))


def _logit_bias(value: Any, batch: int, vocab: int) -> jax.Array | None:
    rows = _per_row("logit_bias", value, batch)
    if all(row is None for row in rows):
        return None
    bias = np.zeros((batch, vocab), np.float32)
    for row, entries in enumerate(rows):
        for token, amount in (entries or {}).items():
            if not (is_int(token) and 0 <= token < vocab and _is_real(amount) and not math.isnan(amount)):
                raise ValueError(f"logit_bias maps token ids below {vocab} to numbers, got {token!r}: {amount!r}")
            bias[row, token] = amount
    return jnp.asarray(bias)


def _allowed(value: Any, batch: int, vocab: int) -> jax.Array | None:
    one_list_for_all = isinstance(value, list | tuple | set | frozenset) and all(is_int(v) for v in value)
    rows = [value] * batch if one_list_for_all else _per_row("allowed_token_ids", value, batch)
    if all(row is None for row in rows):
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
    return jnp.asarray(allowed)


def options_of(given: dict[str, Any]) -> Options:
    """The options by name. Raises ValueError for an unknown name, with the nearest known one."""
    known = [field.name for field in dataclasses.fields(Options)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"{name!r} is no option{meant}; the options are the fields of specjax.Options")
    return Options(**given)


def on_host(prompts: Any) -> Any:
    """The same prompts with numbers and lists in place of JAX arrays."""
    if isinstance(prompts, jax.Array):
        return np.asarray(prompts).tolist()
    return [on_host(prompt) for prompt in prompts] if isinstance(prompts, list | tuple) else prompts
