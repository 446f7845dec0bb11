"""The configuration of T5 and Flan-T5, and how it is read from a Hugging Face ``config.json``."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from specjax.models import config_keys as keys
from specjax.models import config_values as values

_SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_layers": "num_encoder_layers",
    "num_decoder_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "d_kv": "head_dim",
}
_OTHERS = {
    "relative_attention_num_buckets": "num_buckets",
    "relative_attention_max_distance": "max_distance",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "feed_forward_proj": "feed_forward_proj",
    "tie_word_embeddings": "tie_word_embeddings",
    "scale_decoder_outputs": "scaled_head",
}
_PROJECTIONS = ("relu", "gated-gelu", "gated-silu")
_RULES = {
    **dict.fromkeys(_SIZES, values.COUNT),
    "relative_attention_num_buckets": values.Rule(
        "an even number of at least 4", lambda v: values.COUNT.holds(v) and v >= 4 and v % 2 == 0
    ),
    "relative_attention_max_distance": values.COUNT,
    "layer_norm_epsilon": values.POSITIVE,
    "feed_forward_proj": values.Rule(" or ".join(map(repr, _PROJECTIONS)), lambda v: v in _PROJECTIONS),
    "tie_word_embeddings": values.FLAG,
    "scale_decoder_outputs": values.FLAG,
}
_ONLY = {"is_encoder_decoder": (True,), "is_decoder": (False,)}
# Keys that transformers reads into no layer: dropouts, numbers of the training, and what follows from other keys.
_IGNORED = frozenset(
    "n_positions dropout_rate classifier_dropout initializer_factor output_past dense_act_fn is_gated_act".split()
)
_DEFAULTS = {
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Shape and constants of a T5. Common names are those of :class:`specjax.models.config.LlamaConfig`.

    Layers, heads and sizes are the decoder's, and the encoder has the same sizes.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    num_encoder_layers: int
    num_buckets: int = 32  # of distances between tokens, each with a bias of its own for each head
    max_distance: int = 128  # from this distance on all share one bucket
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str = "relu"  # "gated-gelu": gelu(gate(x)) * up(x) in place of relu(up(x))
    tie_word_embeddings: bool = True
    scaled_head: bool = True  # whether hidden states are divided by the root of their size before the output head
    decoder_start_token_id: int = 0
    eos_token_ids: tuple[int, ...] = ()
    # The longest source and text together. T5 knows distances alone and has no end; this is where specjax stops.
    max_position_embeddings: int = 4096
    model_type: str = "t5"
    bos_token_id: ClassVar[None] = None
    embedding_scale: ClassVar[None] = None

    def __post_init__(self):
        names = {**_SIZES, **_OTHERS}
        rules = {**{names[key]: rule for key, rule in _RULES.items()}, "max_position_embeddings": values.COUNT}
        given = {name: getattr(self, name) for name in rules}
        problems = [rules[name].problem(name, None) for name in given if given[name] is None]
        problems += values.problems(given, rules)
        if not problems and self.max_distance <= self.num_buckets // 2:
            least = self.num_buckets // 2 + 1
            problems.append(f"max_distance must be at least num_buckets / 2 + 1 = {least}, got {self.max_distance}")
        if not (problems or values.token_id(self.vocab_size).holds(self.decoder_start_token_id)):
            rule = values.token_id(self.vocab_size)
            problems.append(rule.problem("decoder_start_token_id", self.decoder_start_token_id))
        if problems:
            raise ValueError(f"config: {'; '.join(problems)}")

    @property
    def start_ids(self) -> tuple[int, ...]:
        """The tokens with which the decoder starts after the source."""
        return (self.decoder_start_token_id,)

    @property
    def num_key_value_heads(self) -> int:
        """Each query head has its own key/value head."""
        return self.num_attention_heads

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate (T5 1.1, Flan-T5)."""
        return self.feed_forward_proj.startswith("gated-")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; :meth:`from_dict` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "T5Config":
        """The inverse of :meth:`to_dict`."""
        return cls(**{**data, "eos_token_ids": tuple(data.get("eos_token_ids", ()))})


def _t5_1_1(hidden, intermediate, layers, heads) -> T5Config:
    return T5Config(
        vocab_size=32128,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        head_dim=64,
        num_encoder_layers=layers,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        scaled_head=False,
        eos_token_ids=(1,),
        max_position_embeddings=8192,
    )


# Published shapes of T5 1.1, for benchmarks on made-up weights.
PRESETS = {
    "t5-small": _t5_1_1(512, 1024, 8, 6),
    "t5-xxl": _t5_1_1(4096, 10240, 24, 64),
}


def from_hf(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> T5Config:
    """The configuration that a T5's ``config.json`` describes. Arguments and errors as for Llama's ``from_hf``."""
    generation = generation or {}
    hf = {**_DEFAULTS, **{key: value for key, value in hf.items() if value is not None or key.endswith("token_id")}}
    hf = {"num_decoder_layers": hf.get("num_layers"), "scale_decoder_outputs": hf["tie_word_embeddings"], **hf}
    problems = [f"{key} is missing" for key in _SIZES if hf.get(key) is None]
    problems += keys.refused(hf, frozenset(_RULES) | _IGNORED | {"model_type"}, _ONLY) + values.problems(hf, _RULES)
    problems = problems or values.problems_of_ids(hf, generation)
    starts = (source.get("decoder_start_token_id") for source in (generation, hf))
    start = next((token for token in starts if token is not None), hf["pad_token_id"])
    if not problems and not values.token_id(hf["vocab_size"]).holds(start):
        problems.append(values.token_id(hf["vocab_size"]).problem("decoder_start_token_id", start))
    if problems:
        raise ValueError("config.json can't be used:\n  " + "\n  ".join(problems))
    fields = {name: hf[key] for key, name in {**_SIZES, **_OTHERS}.items()}
    return T5Config(**fields, decoder_start_token_id=start, eos_token_ids=values.special_ids(hf, generation)[1])


def to_hf(config: T5Config) -> dict[str, Any]:
    """A Hugging Face ``config.json`` of this model. :func:`from_hf` is the inverse."""
    return {
        "model_type": config.model_type,
        "is_encoder_decoder": True,
        **{key: getattr(config, name) for key, name in {**_SIZES, **_OTHERS}.items()},
        "decoder_start_token_id": config.decoder_start_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
