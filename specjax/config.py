"""Frozen model configurations, and the closed table that reads them from a Hugging Face ``config.json``."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the trained context. See :mod:`specjax.models.rope`.

    ``kind`` is one of ``linear``, ``llama3``, ``yarn``; fields that a kind does not use keep their defaults.
    """

    kind: str
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None derives it from the factor and the mscales
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: whether the correction range is rounded to whole dimensions


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape and constants of a Llama-family model, named as in Hugging Face's ``config.json``."""

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

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ValueError(f"config: {name} must be a positive integer, got {value!r}")
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

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; :meth:`from_dict` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "LlamaConfig":
        """Inverse of :meth:`to_dict`."""
        fields = dict(data)
        if fields.get("rope_scaling") is not None:
            fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
        fields["eos_token_ids"] = tuple(fields.get("eos_token_ids", ()))
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


# Published shapes, for benchmarks on made-up weights; a checkpoint brings its own config.json.
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
}


# Keys of a config.json that change nothing in inference.
_IGNORED = frozenset(
    "_name_or_path architectures auto_map torch_dtype dtype transformers_version use_cache initializer_range "
    "pad_token_id attention_dropout hidden_dropout is_llama_config transformers.js_config id2label label2id "
    "num_labels problem_type task_specific_params return_dict output_hidden_states output_attentions torchscript "
    "use_bfloat16 tokenizer_class prefix begin_suppress_tokens chunk_size_feed_forward finetuning_task "
    "name_or_path bos_token_id eos_token_id max_sequence_length model_max_length unsloth_version unsloth_fixed "
    "use_return_dict _attn_implementation_autoset _attn_implementation attn_implementation".split()
)
# Keys whose only implemented value is the one given (None and absence always pass).
_REQUIRED: dict[str, tuple] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, 1.0),
    "sliding_window": (),
    "layer_types": (),
    "quantization_config": (),
    "pruned_heads": ({},),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "tie_encoder_decoder": (False,),
    "qk_layernorm": (False,),
    "use_qk_norm": (False,),
    "no_rope_layers": (),
}
_READ = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters tie_word_embeddings "
    "attention_bias mlp_bias".split()
)


def from_hf(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> LlamaConfig:
    """Reads a Hugging Face Llama ``config.json`` (and ``generation_config.json``), refusing what is not implemented.

    End-of-sequence ids are those of ``generation_config.json`` and of ``config.json`` together (``specjax.load`` adds
    the tokenizer's); the caller of ``generate`` may override them.

    Raises:
      ValueError: naming every key that is missing, unknown or has a value that specjax does not implement.
    """
    problems = []
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if hf.get(key) is None:
            problems.append(f"{key} is missing")
    for key, value in hf.items():
        if key in _REQUIRED:
            if value is not None and value not in _REQUIRED[key]:
                implemented = " or ".join(repr(v) for v in _REQUIRED[key]) or "null"
                problems.append(f"{key} = {value!r} is not implemented (only {implemented})")
        elif key not in _IGNORED and key not in _READ:
            problems.append(f"{key} = {value!r} is unknown to specjax, so its effect on the model can't be ruled out")
    if hf.get("model_type") is None:
        problems.append("model_type is missing (only 'llama' is implemented)")
    if problems:
        raise ValueError("config.json can't be used:\n  " + "\n  ".join(problems))

    heads, head_dim = hf["num_attention_heads"], hf.get("head_dim")
    if head_dim is None:
        if hf["hidden_size"] % heads:
            raise ValueError(
                f"config.json can't be used: hidden_size ({hf['hidden_size']}) is not a multiple of "
                f"num_attention_heads ({heads}) and head_dim is not given; set head_dim"
            )
        head_dim = hf["hidden_size"] // heads
    max_position = hf.get("max_position_embeddings") or 2048
    theta, scaling = _read_rope(hf, max_position)
    ends = [source.get("eos_token_id") for source in (generation or {}, hf)]
    eos = [token for end in ends if end is not None for token in (end if isinstance(end, list | tuple) else [end])]
    bos = (generation or {}).get("bos_token_id")
    return LlamaConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_hidden_layers=hf["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=hf.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rms_norm_eps=1e-6 if hf.get("rms_norm_eps") is None else hf["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        attention_bias=bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
        bos_token_id=hf.get("bos_token_id") if bos is None else bos,
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """A Hugging Face ``config.json`` of this model; :func:`from_hf` is its inverse."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is not None:
        rope["rope_type"] = scaling.kind
        fields = {name: getattr(scaling, name) for name in sorted(_ROPE_FIELDS[scaling.kind])}
        rope |= {name: value for name, value in fields.items() if value is not None}
    same = [field.name for field in dataclasses.fields(config) if field.name in _READ - {"rope_theta", "rope_scaling"}]
    return {
        "model_type": "llama",
        **{name: getattr(config, name) for name in same},
        "rope_parameters": rope,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }


_ROPE_FIELDS = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
_ROPE_REFUSED = {
    "dynamic": "its frequencies change with the length reached, so cached keys would need rotating again",
    "longrope": "its per-dimension factors are not implemented",
}


def _read_rope(hf: Mapping[str, Any], max_position: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling), from either spelling: top-level ``rope_theta`` + ``rope_scaling``, or ``rope_parameters``."""
    if hf.get("rope_parameters") and hf.get("rope_scaling"):
        if {**hf["rope_parameters"]} != {**hf["rope_parameters"], **hf["rope_scaling"]}:
            raise ValueError("config.json gives both rope_parameters and rope_scaling, and they differ; keep one")
    # A null is an absent key here too: a null factor must not pass for one that was given.
    rope = {k: v for k, v in (hf.get("rope_parameters") or hf.get("rope_scaling") or {}).items() if v is not None}
    thetas = [t for t in (hf.get("rope_theta"), rope.pop("rope_theta", None)) if t is not None]
    if len(set(thetas)) > 1:
        raise ValueError(
            f"config.json gives rope_theta twice, and differently: {thetas[0]} at top level, {thetas[1]} inside "
            "rope_parameters; keep the right one"
        )
    theta = float(thetas[0]) if thetas else 10000.0
    kinds = {rope.pop("rope_type", None), rope.pop("type", None)} - {None}
    if len(kinds) > 1:
        raise ValueError(f"config.json names two rope types: {sorted(kinds)}; keep one")
    kind = kinds.pop() if kinds else "default"
    rope.pop("partial_rotary_factor", None) if rope.get("partial_rotary_factor") in (1, 1.0) else None
    if kind == "default":
        if rope:
            raise ValueError(f"config.json: rope scaling gives {sorted(rope)} but no rope_type that reads them")
        return theta, None
    if kind not in _ROPE_FIELDS:
        reason = _ROPE_REFUSED.get(kind, f"known kinds are default, {', '.join(_ROPE_FIELDS)}")
        raise ValueError(f"config.json: rope scaling {kind!r} is not implemented: {reason}")
    unknown = set(rope) - _ROPE_FIELDS[kind]
    if unknown or "factor" not in rope:
        raise ValueError(
            f"config.json: rope scaling {kind!r} takes {sorted(_ROPE_FIELDS[kind])} (factor is required), "
            f"got {sorted(rope)}"
        )
    if kind != "linear":
        rope.setdefault("original_max_position_embeddings", max_position)
    return theta, RopeScaling(kind=kind, **rope)
