"""Rules for the values of a configuration: one rule per key, each with the words for an error message."""

import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_SMALLEST, _LARGEST = 1.1754944e-38, 3.4028235e38  # the normal range of float32, in which a model computes


class Rule(NamedTuple):
    """Which values a key may have."""

    expected: str  # what the value must be; completes the sentence "KEY must be ..."
    holds: Callable[[Any], bool]  # whether a value obeys the rule
    limit: str = ""  # appended to the error message

    def problem(self, key: str, value: Any) -> str:
        """The sentence about a value that breaks the rule."""
        shown = repr(value)
        return f"{key} must be {self.expected}, got {shown if len(shown) <= 200 else shown[:200] + '...'}{self.limit}"


def is_integer(value: Any) -> bool:
    """Whether the value is an integer. True and False don't count as integers."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether the value is a real number in float32's range. NaN, infinity, True and False don't count as numbers."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and -_LARGEST <= value <= _LARGEST


def _is_list_of_ids(value: Any, size: int) -> bool:
    return isinstance(value, list | tuple) and all(is_integer(i) and 0 <= i < size for i in value)


def are_rising(value: Any, size: int) -> bool:
    """Whether the value is a list of rising integers, at least one, each from 0 to ``size`` - 1."""
    return isinstance(value, list) and bool(value) and _is_list_of_ids(value, size) and sorted(set(value)) == value


COUNT = Rule("a positive integer", lambda v: is_integer(v) and 0 < v < 2**31, " (at most 2**31 - 1)")
POSITIVE = Rule("a positive number", lambda v: is_number(v) and v >= _SMALLEST, " (in float32's range)")
NOT_NEGATIVE = Rule("a number from 0 up", lambda v: is_number(v) and v >= 0)
FLAG = Rule("true or false", lambda v: isinstance(v, bool))
OBJECT = Rule("an object or null", lambda v: isinstance(v, Mapping))
TEXT = Rule("text", lambda v: isinstance(v, str))
NUMBERS_OF_LAYERS = Rule("numbers of layers", lambda v: all(is_integer(i) and i >= 0 for i in v))


def token_id(vocab_size: int) -> Rule:
    """The rule for one id of a vocabulary."""
    return Rule(f"an id from 0 to {vocab_size - 1}", lambda v: is_integer(v) and 0 <= v < vocab_size)


def token_ids(vocab_size: int) -> Rule:
    """The rule for one id of a vocabulary, or a list of ids."""
    one = token_id(vocab_size)
    return Rule(f"{one.expected}, or a list of such ids", lambda v: one.holds(v) or _is_list_of_ids(v, vocab_size))


def special_ids(hf: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """The id of the first token, and the ids that end a text, of ``generation_config.json`` and ``config.json``."""
    bos = generation.get("bos_token_id")
    ends = [source.get("eos_token_id") for source in (generation, hf)]
    eos = [token for end in ends if end is not None for token in (end if isinstance(end, list | tuple) else [end])]
    return hf.get("bos_token_id") if bos is None else bos, tuple(dict.fromkeys(eos))


def problems_of_ids(hf: Mapping[str, Any], generation: Mapping[str, Any]) -> list[str]:
    """A sentence for each special id of the two files that is no id of the vocabulary."""
    size = hf["vocab_size"]
    ids = {"bos_token_id": token_id(size), "eos_token_id": token_ids(size)}
    return problems(hf, ids) + [f"generation_config.json: {problem}" for problem in problems(generation, ids)]


def problems(values: Mapping[str, Any], rules: Mapping[str, Rule]) -> list[str]:
    """A sentence for each value that breaks its rule. A key that is absent or null breaks no rule."""
    given = {key: values[key] for key in rules if values.get(key) is not None}
    return [rules[key].problem(key, value) for key, value in given.items() if not rules[key].holds(value)]


SIZES = {
    key: COUNT
    for key in (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings"
    ).split()
}
MODEL = {
    **SIZES,
    "rms_norm_eps": POSITIVE,
    "rope_theta": POSITIVE,
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
}
# The features of Llama's relatives: fields of the configuration.
FEATURES = {
    **dict.fromkeys(("qkv_bias", "qk_norm", "norm_plus_one", "post_norms", "scaled_embedding"), FLAG),
    "hidden_act": Rule("'silu' or 'gelu_pytorch_tanh'", lambda v: v in ("silu", "gelu_pytorch_tanh")),
    "query_pre_attn_scalar": POSITIVE,
    "attn_logit_softcapping": POSITIVE,
    "final_logit_softcapping": POSITIVE,
    "sliding_window": COUNT,
    "local_layers": NUMBERS_OF_LAYERS,
    "rope_local_base_freq": POSITIVE,
    "unrotated_layers": NUMBERS_OF_LAYERS,
}
# The keys of config.json that relatives read and Llama does not.
OF_RELATIVES = {
    **{key: FEATURES[key] for key in FEATURES if not key.endswith("_layers")},
    "use_sliding_window": FLAG,
    "max_window_layers": Rule("an integer from 0 up", lambda v: is_integer(v) and v >= 0),
    "sliding_window_pattern": COUNT,
    "no_rope_layer_interval": COUNT,
    "layer_types": Rule(
        "a list of 'full_attention' and 'sliding_attention'",
        lambda v: isinstance(v, list | tuple) and all(x in ("full_attention", "sliding_attention") for x in v),
    ),
    "no_rope_layers": Rule(
        "a list of 0 and 1", lambda v: isinstance(v, list | tuple) and all(is_integer(x) and x in (0, 1) for x in v)
    ),
}
ROPE = {
    "factor": POSITIVE,
    "original_max_position_embeddings": COUNT,
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "beta_fast": POSITIVE,
    "beta_slow": POSITIVE,
    "attention_factor": POSITIVE,
    "mscale": NOT_NEGATIVE,
    "mscale_all_dim": NOT_NEGATIVE,
    "truncate": FLAG,
    "factors": Rule("positive numbers", lambda v: isinstance(v, tuple) and all(map(POSITIVE.holds, v))),
}
# The fields that each kind of rope scaling reads.
ROPE_FIELDS = {
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
             "mscale_all_dim", "truncate"},
    "factors": {"factors"},
}  # fmt: skip
