"""The configuration of Llama and its relatives, and how it is read from a Hugging Face ``config.json``."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from specjax.models import config_keys as keys
from specjax.models import config_values as values
from specjax.models import relatives, rope_scaling
from specjax.models.rope_scaling import RopeScaling


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape and constants of a Llama or a relative of it. The names are those of Hugging Face's ``config.json``.

    The fields from ``model_type`` on are the features of relatives. Without them the model is a Llama.
    :mod:`specjax.models.relatives` says which family has which.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    start_ids: ClassVar[tuple[int, ...]] = ()  # the tokens with which a decoder starts after a source; no encoder, none
    model_type: str = "llama"  # the name of the family in config.json
    qkv_bias: bool = False  # q, k and v have a bias, and o has none
    qk_norm: bool = False  # each head's query and key is normed before its rotation
    hidden_act: str = "silu"  # the MLP's activation: "silu" or "gelu_pytorch_tanh"
    norm_plus_one: bool = False  # norms multiply by 1 + weight
    post_norms: bool = False  # the outputs of attention and MLP are normed before they are added
    scaled_embedding: bool = False  # embeddings are multiplied by the root of the hidden size
    query_pre_attn_scalar: float | None = None  # scores are divided by its root; None: by the root of head_dim
    attn_logit_softcapping: float | None = None  # scores s become cap * tanh(s / cap)
    final_logit_softcapping: float | None = None  # logits too
    sliding_window: int | None = None  # how many tokens, itself included, a token sees in a local layer
    local_layers: tuple[int, ...] = ()  # the layers that see only the window
    rope_local_base_freq: float | None = None  # rope_theta of local layers, without scaling; None: as in other layers
    unrotated_layers: tuple[int, ...] = ()  # the layers whose queries and keys are not rotated

    def __post_init__(self):
        given = dataclasses.asdict(self)
        required = [values.MODEL[name].problem(name, None) for name in values.MODEL if given[name] is None]
        problems = required + values.problems(given, values.MODEL | values.FEATURES)
        if self.model_type not in relatives.FAMILIES:
            problems.append(f"model_type must be one of {', '.join(relatives.FAMILIES)}, got {self.model_type!r}")
        if self.local_layers and self.sliding_window is None:
            problems.append("sliding_window must be given, because local_layers names layers with a window")
        if self.bos_token_id is not None and not values.is_integer(self.bos_token_id):
            problems.append(f"bos_token_id must be an integer or None, got {self.bos_token_id!r}")
        if not all(map(values.is_integer, self.eos_token_ids)):
            problems.append(f"eos_token_ids must be integers, got {self.eos_token_ids!r}")
        if problems:
            raise ValueError(f"config: {'; '.join(problems)}")
        if self.rope_scaling is not None and self.rope_scaling.kind == "factors":
            if len(self.rope_scaling.factors) != self.head_dim // 2:
                raise ValueError(
                    f"config: rope scaling has {len(self.rope_scaling.factors)} factors, expected head_dim / 2 = "
                    f"{self.head_dim // 2}"
                )
        if self.rope_scaling is not None and self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"config: rope_theta must be greater than 1 under yarn scaling, got {self.rope_theta}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"config: num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"config: head_dim must be even for rotary embeddings, got {self.head_dim}")

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def embedding_scale(self) -> float | None:
        """The factor on embeddings; None: there is none."""
        return self.hidden_size**0.5 if self.scaled_embedding else None

    @property
    def score_scale(self) -> float | None:
        """The factor on attention scores; None: the root of 1 / head_dim."""
        scalar = self.query_pre_attn_scalar
        return None if scalar is None or scalar == self.head_dim else scalar**-0.5

    def of_layers(self, layers: tuple[int, ...]) -> "LlamaConfig":
        """The configuration of a model that has only these layers of this model."""

        def kept(numbers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(new for new, old in enumerate(layers) if old in numbers)

        return dataclasses.replace(
            self,
            num_hidden_layers=len(layers),
            local_layers=kept(self.local_layers),
            unrotated_layers=kept(self.unrotated_layers),
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; :meth:`from_dict` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "LlamaConfig":
        """The inverse of :meth:`to_dict`."""
        fields = dict(data)
        if fields.get("rope_scaling") is not None:
            scaling = dict(fields["rope_scaling"])
            fields["rope_scaling"] = RopeScaling(**{**scaling, "factors": tuple(scaling.get("factors", ()))})
        for name in ("eos_token_ids", "local_layers", "unrotated_layers"):
            fields[name] = tuple(fields.get(name, ()))
        return cls(**fields)


def _llama3(hidden, intermediate, layers, heads, head_dim, tied, factor, **changes) -> LlamaConfig:
    return LlamaConfig(
        **{
            **dict(
                vocab_size=128256,
                hidden_size=hidden,
                intermediate_size=intermediate,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=8,
                head_dim=head_dim,
                max_position_embeddings=131072,
                rms_norm_eps=1e-5,
                rope_theta=500000.0,
                tie_word_embeddings=tied,
                bos_token_id=128000,
                eos_token_ids=(128001, 128008, 128009),
                rope_scaling=RopeScaling("llama3", factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
            ),
            **changes,
        }
    )


def _qwen3(hidden, intermediate, layers, heads, tied) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        tie_word_embeddings=tied,
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
        model_type="qwen3",
        qk_norm=True,
    )


# Published shapes, for benchmarks on made-up weights. A checkpoint needs none of these: its config.json has the shape.
PRESETS = {
    "smollm2-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 64, tied=True, factor=32.0),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, 128, tied=True, factor=32.0),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, 128, tied=False, factor=8.0),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64, 128, tied=False, factor=8.0),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
}


def from_hf(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> LlamaConfig:
    """The configuration that a ``config.json`` of Llama or a relative describes. What is not implemented is refused.

    ``eos_token_ids`` are the ids of ``generation_config.json`` and of ``config.json`` together. ``specjax.load`` adds
    the tokenizer's id, and the caller of ``generate`` may override all of them.

    Args:
      hf: the contents of ``config.json``.
      generation: the contents of ``generation_config.json``; None: there is no such file.

    Raises:
      ValueError: keys are missing, unknown, or have a value that specjax does not implement. One error names them all.
    """
    family = _family_of(hf)
    two_bases = "rope_local_base_freq" in family.reads
    hf = relatives.with_defaults(family, rope_scaling.flat(hf) if two_bases else hf)
    max_position = 2048 if hf.get("max_position_embeddings") is None else hf["max_position_embeddings"]
    theta, scaling = _read_checked(family, hf, generation or {}, max_position)
    heads = hf["num_attention_heads"]
    kv_heads = heads if hf.get("num_key_value_heads") is None else hf["num_key_value_heads"]
    read = {name: hf.get(name) for name in values.FEATURES.keys() & family.reads if name != "sliding_window"}
    features: dict[str, Any] = {**read, **family.sets}
    bos, eos = values.special_ids(hf, generation or {})
    return LlamaConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_hidden_layers=hf["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_head_dim(hf),
        max_position_embeddings=max_position,
        rms_norm_eps=1e-6 if hf.get("rms_norm_eps") is None else hf["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        attention_bias=bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
        bos_token_id=bos,
        eos_token_ids=eos,
        model_type=hf["model_type"],
        local_layers=(local := relatives.local_layers(family, hf)),
        unrotated_layers=relatives.unrotated_layers(hf),
        sliding_window=hf["sliding_window"] if local else None,
        **features,
    )


def _head_dim(hf: Mapping[str, Any]) -> int:
    """The size of a head, which a file may leave to follow from the hidden size."""
    if hf.get("head_dim") is not None:
        return hf["head_dim"]
    if hf["hidden_size"] % hf["num_attention_heads"]:
        raise ValueError(
            f"config.json can't be used: hidden_size ({hf['hidden_size']}) is not a multiple of num_attention_heads "
            f"({hf['num_attention_heads']}) and head_dim is not given; set head_dim"
        )
    return hf["hidden_size"] // hf["num_attention_heads"]


def _family_of(hf: Mapping[str, Any]) -> relatives.Family:
    """The family that ``model_type`` names. Of an unknown one no key is looked at, because its keys are others."""
    name = hf.get("model_type")
    if name is None:
        return relatives.FAMILIES["llama"]  # the missing key is reported with all other faults
    if str(name) not in relatives.FAMILIES:
        raise ValueError(
            f"config.json can't be used:\n  model_type = {name!r} is not implemented (only "
            f"{', '.join(relatives.FAMILIES)}, gpt2 and t5)"
        )
    return relatives.FAMILIES[name]


def _read_checked(
    family: relatives.Family, hf: Mapping[str, Any], generation: Mapping[str, Any], max_position: Any
) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) of the rotary embeddings, after a check of every key and value. One error lists all faults."""
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    problems = [f"{key} is missing" for key in needed if hf.get(key) is None]
    if hf.get("model_type") is None:
        problems.append(f"model_type is missing (implemented are {', '.join(relatives.FAMILIES)}, gpt2 and t5)")
    rules = {key: rule for key, rule in values.MODEL.items() if key != "rope_theta"}
    rules |= {key: rule for key, rule in values.OF_RELATIVES.items() if key in family.reads}
    problems += keys.refused(hf, keys.READ | family.reads, family.only) + values.problems(hf, rules)
    theta, scaling = family.theta, None
    try:
        theta, scaling = rope_scaling.read(hf, max_position, family.theta)
    except ValueError as problem:
        problems.append(str(problem))
    if not problems:
        problems = keys.lists_of_layers(hf, family) + values.problems_of_ids(hf, generation)
    if problems:
        raise ValueError("config.json can't be used:\n  " + "\n  ".join(problems))
    return theta, scaling


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """A Hugging Face ``config.json`` of this model. :func:`from_hf` is the inverse, except for ``factors`` scaling.

    transformers has no ``factors`` scaling. The file says ``longrope`` instead, with the same factors for short and
    long texts.
    """
    family = relatives.FAMILIES[config.model_type]
    outside_rope = (keys.READ | family.reads) - {"rope_theta", "rope_scaling", "rope_local_base_freq"}
    same = [field.name for field in dataclasses.fields(config) if field.name in outside_rope - family.only.keys()]
    return {
        "model_type": config.model_type,
        **{name: getattr(config, name) for name in same},
        **relatives.to_hf(family, config),
        "rope_parameters": rope_scaling.to_hf(config),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
