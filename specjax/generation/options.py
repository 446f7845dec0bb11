"""The options of ``generate`` and ``stream``."""

import dataclasses
import difflib
import secrets
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.decode.numeric import is_int, per_row, without_arrays


@dataclasses.dataclass(frozen=True)
class Options:
    """How to generate.

    Every sampling parameter takes one value for all rows, or a list with one value for each row. None switches the
    parameter off.
    """

    # Who proposes tokens: None (plain decoding), "ngram" (prompt lookup), "auto" (``specjax.drafters.auto(lm)``, which
    # reads the head that comes with specjax for the model at each call), or an object of specjax.drafters.
    drafter: Any = None
    # Who judges drafts: "rejection", "coupled", "block", "traversal", or an object of specjax.verify.
    verifier: Any = "rejection"
    # K, the most drafted tokens that a round can accept in one row. 0 is plain decoding.
    num_speculative_tokens: int = 5
    # The tokens a row of every target call while decoding, padding included: at least as many as the drafter's widest
    # block, which is K + 1 tokens for a chain, and at most the model's context. With one width for all, also for plain
    # decoding, the target computes with one shape, so a greedy text doesn't depend on the drafter, even in bfloat16.
    # None: the narrowest block.
    block_width: int | None = None
    # The largest number of new tokens. None or -1: as many as the model's context holds. 0: no token is generated.
    max_new_tokens: int | None | Sequence[int | None] = 128
    # The number of new tokens before which no stop token is generated and no stop string ends the row.
    min_new_tokens: int | None | Sequence[int | None] = None
    # T. 0 is greedy. A value below MIN_TEMPERATURE counts as 0.
    temperature: float | Sequence[float] = 0.0
    # The number of likeliest tokens that are kept. 0 and -1 are off.
    top_k: int | None | Sequence[int | None] = None
    # The probability that the kept tokens have together at least, above 0 and at most 1.
    top_p: float | None | Sequence[float | None] = None
    # The smallest probability that is kept, as a fraction of the likeliest token's probability.
    min_p: float | None | Sequence[float | None] = None
    # A factor against tokens that the prompt or the output holds. 1 is off.
    repetition_penalty: float | None | Sequence[float | None] = None
    # An amount that is subtracted from the logits of tokens that the output holds.
    presence_penalty: float | None | Sequence[float | None] = None
    # An amount that is subtracted for each time that the output holds the token.
    frequency_penalty: float | None | Sequence[float | None] = None
    # The length of n-grams that must not occur twice in prompt and output. 0 is off.
    no_repeat_ngram_size: int | None | Sequence[int | None] = None
    # Token ids and the amounts that are added to their logits. -inf forbids a token.
    logit_bias: dict[int, float] | None | Sequence[dict[int, float] | None] = None
    # The only token ids that may be generated.
    allowed_token_ids: Sequence[int] | None | Sequence[Sequence[int] | None] = None
    # Whether ids that the tokenizer lacks may stand in prompts and be generated.
    allow_unknown_ids: bool = False
    # Strings or special tokens that end a row. The row's text keeps the string, as in Hugging Face.
    stop: str | Sequence[str] | None = None
    # Tokens that end a row, in place of the model's own (lm.config.eos_token_ids).
    eos_token_id: int | Sequence[int] | None = None
    # Whether end-of-text tokens do not end a row. Stop strings still do.
    ignore_eos: bool = False
    # An integer from 0 to 2^64 - 1: row i uses seed + i. A list: row i uses entry i. None: a fresh random seed.
    seed: int | None | Sequence[int | None] = 0
    # Whether each text prompt is wrapped as a user's turn in the model's chat template. Conversations always are.
    chat: bool = False
    # Tools for the chat template: JSON schemas, or Python functions with docstrings.
    tools: Sequence[Any] | None = None
    # Further variables of the chat template.
    chat_template_kwargs: dict[str, Any] | None = None
    # The date in ISO format, for a chat template that asks for the present date. None: today.
    date: str | None = None
    # Whether control strings in prompts are read as tokens. None: in plain text they are, in messages they are not.
    parse_special: bool | None = None
    # Whether verifiers that change the output's distribution are allowed.
    lossy: bool = False
    # True: the result has each new token's log-probability under the model's raw logits. A number n: the result also
    # has the n likeliest tokens at each position.
    logprobs: bool | int = False
    # The number of tokens that each row has room for at least. Calls with the same capacity can share a program.
    capacity: int | None = None
    # W, the number of texts of each prompt that beam search keeps while they grow (docs/beams.md). 1: no beam search.
    num_beams: int = 1
    # The number of texts that beam search returns for each prompt, the best first; at most num_beams.
    num_return_sequences: int = 1
    # A text's score is its log-probability over (its number of new tokens) ** length_penalty; from -5 to 5.
    length_penalty: float | Sequence[float] = 1.0
    # When beam search ends with num_beams finished texts. True: at once. False: unless the best beam would now have a
    # better score than the worst of them. "never": unless the best beam could still come to a better score.
    early_stopping: bool | str = False
    # u, the beams of the draft, at least num_beams. None: twice num_beams.
    num_draft_beams: int | None = None


# The options that have a meaning in beam search alone.
OF_BEAMS = ("num_beams", "num_return_sequences", "length_penalty", "early_stopping", "num_draft_beams")


def changed(options: Options, names: Sequence[str]) -> list[str]:
    """Those of the options ``names`` that don't have their default value."""
    default = Options()

    def same(a: Any, b: Any) -> bool:  # 0 is not False: logprobs=0 asks for log-probabilities
        return np.array_equal(a, b) and isinstance(a, bool) == isinstance(b, bool)

    return [name for name in names if not same(getattr(options, name), getattr(default, name))]


def options_of(given: dict[str, Any]) -> Options:
    """The options by name.

    Raises:
      ValueError: a name is unknown. The message gives the nearest known name.
    """
    known = [field.name for field in dataclasses.fields(Options)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"{name!r} is no option{meant}; the options are the fields of specjax.Options")
    return Options(**given)


def seeds(seed: Any, batch: int) -> list[int]:
    """One seed for each row. All 64 bits of a seed count.

    Args:
      seed: as ``Options.seed``: None becomes a fresh random seed.
      batch: the number of rows.

    Raises:
      ValueError: a seed is not an integer from 0 to 2^64 - 1.
    """
    seed = without_arrays(seed)  # in NumPy's integers seed + row would overflow, or wrap around to another row's seed
    given = [seed + row for row in range(batch)] if is_int(seed) else per_row("seed", seed, batch)
    drawn = [secrets.randbits(53) if one is None else one for one in given]  # JSON's numbers hold 53 bits exactly
    if not all(is_int(one) and 0 <= one < 1 << 64 for one in drawn):
        raise ValueError(
            f"seed must be an integer from 0 to 2^64 - 1, None for a fresh one, or a list of one a prompt, got {seed!r}"
            + (f"; prompt i of {batch} has seed + i" if is_int(seed) and batch > 1 else "")
        )
    return [int(one) for one in drawn]


def filters_without_effect(options: Options) -> list[str]:
    """The names of those filters (top_p, top_k, min_p) that a row uses. At temperature 0 a filter has no effect."""
    off: dict[str, tuple] = {"top_p": (None, 1), "top_k": (None, 0, -1), "min_p": (None, 0)}

    def given(name: str) -> list[Any]:  # values that are no numbers are refused later
        return np.asarray(getattr(options, name), object).ravel().tolist()

    return [name for name, values in off.items() if any(v not in values for v in given(name))]


def asked(given: dict[str, Any]) -> Options:
    """The options by name. Warns of filters that have no effect because no temperature is given.

    Raises:
      ValueError: as in :func:`options_of`.
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
