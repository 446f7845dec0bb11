"""Frozen model configurations, and the closed table that reads them from a Hugging Face ``config.json``."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.models import config_keys as keys
from specjax.models import config_values as values


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the trained context. See :mod:`specjax.models.rope`.

    A field that the kind does not use keeps its default. Except for ``kind`` and ``factors``, names and meanings are
    those of Hugging Face.
    """

    kind: str  # "linear", "llama3", "yarn" or "factors"
    factor: float = 1.0  # all kinds but "factors": by how much the context is stretched
    original_max_position_embeddings: int = 0  # llama3 and yarn: the trained context, in tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: the factor on cos and sin; None: it follows from factor and mscales
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: whether the correction range is rounded to whole dimensions
    factors: tuple[float, ...] = ()  # factors: the divisor of each rotated pair's frequency, as GGUF files store them

    def __post_init__(self):
        if self.kind not in values.ROPE_FIELDS:
            raise ValueError(f"rope scaling {self.kind!r} is not implemented: {', '.join(values.ROPE_FIELDS)} are")
        given = {name: getattr(self, name) for name in sorted(values.ROPE_FIELDS[self.kind])}
        problems = values.problems(given, values.ROPE)
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if not problems and low in given and given[low] >= given[high]:
                problems.append(f"{high} ({given[high]}) must be greater than {low} ({given[low]})")
        if problems:
            raise ValueError(f"rope scaling {self.kind!r}: {'; '.join(problems)}")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape and constants of a Llama-family model. The names are those of Hugging Face's ``config.json``."""

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
        given = dataclasses.asdict(self)
        required = [values.MODEL[name].problem(name, None) for name in values.MODEL if given[name] is None]
        problems = required + values.problems(given, values.MODEL)
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
}


def from_hf(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> LlamaConfig:
    """The configuration that a Hugging Face Llama ``config.json`` describes. What is not implemented is refused.

    ``eos_token_ids`` are the ids of ``generation_config.json`` and of ``config.json`` together. ``specjax.load`` adds
    the tokenizer's id, and the caller of ``generate`` may override all of them.

    Args:
      hf: the contents of ``config.json``.
      generation: the contents of ``generation_config.json``; None: there is no such file.

    Raises:
      ValueError: keys are missing, unknown, or have a value that specjax does not implement. One error names them all.
    """
    max_position = 2048 if hf.get("max_position_embeddings") is None else hf["max_position_embeddings"]
    theta, scaling = _read_checked(hf, generation or {}, max_position)
    heads, head_dim = hf["num_attention_heads"], hf.get("head_dim")
    kv_heads = heads if hf.get("num_key_value_heads") is None else hf["num_key_value_heads"]
    if head_dim is None:
        if hf["hidden_size"] % heads:
            raise ValueError(
                f"config.json can't be used: hidden_size ({hf['hidden_size']}) is not a multiple of "
                f"num_attention_heads ({heads}) and head_dim is not given; set head_dim"
            )
        head_dim = hf["hidden_size"] // heads
    ends = [source.get("eos_token_id") for source in (generation or {}, hf)]
    eos = [token for end in ends if end is not None for token in (end if isinstance(end, list | tuple) else [end])]
    bos = (generation or {}).get("bos_token_id")
    return LlamaConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_hidden_layers=hf["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
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


def _read_checked(
    hf: Mapping[str, Any], generation: Mapping[str, Any], max_position: Any
) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) of the rotary embeddings, after a check of every key and value. One error lists all faults."""
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    problems = [f"{key} is missing" for key in needed if hf.get(key) is None]
    if hf.get("model_type") is None:
        problems.append("model_type is missing (only 'llama' is implemented)")
    outside_rope = {key: rule for key, rule in values.MODEL.items() if key != "rope_theta"}
    problems += keys.refused(hf) + values.problems(hf, outside_rope)
    theta, scaling = 10000.0, None
    try:
        theta, scaling = _read_rope(hf, max_position)
    except ValueError as problem:
        problems.append(str(problem))
    if not problems:
        size = hf["vocab_size"]
        ids = {"bos_token_id": values.token_id(size), "eos_token_id": values.token_ids(size)}
        problems = values.problems(hf, ids)
        problems += [f"generation_config.json: {problem}" for problem in values.problems(generation, ids)]
    if problems:
        raise ValueError("config.json can't be used:\n  " + "\n  ".join(problems))
    return theta, scaling


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """A Hugging Face ``config.json`` of this model. :func:`from_hf` is the inverse, except for ``factors`` scaling.

    transformers has no ``factors`` scaling. The file says ``longrope`` instead, with the same factors for short and
    long texts.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "factors":
        both = {"short_factor": list(scaling.factors), "long_factor": list(scaling.factors)}
        rope |= {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, **both}
        rope["original_max_position_embeddings"] = config.max_position_embeddings
    elif scaling is not None:
        rope["rope_type"] = scaling.kind
        fields = {name: getattr(scaling, name) for name in sorted(values.ROPE_FIELDS[scaling.kind])}
        rope |= {name: value for name, value in fields.items() if value is not None}
    outside_rope = keys.READ - {"rope_theta", "rope_scaling"}
    same = [field.name for field in dataclasses.fields(config) if field.name in outside_rope]
    return {
        "model_type": "llama",
        **{name: getattr(config, name) for name in same},
        "rope_parameters": rope,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }


_ROPE_REFUSED = {
    "dynamic": "its frequencies change with the length reached, so cached keys would need rotating again",
    "longrope": "its per-dimension factors are not implemented",
}


def _read_rope(hf: Mapping[str, Any], max_position: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling), from either of two spellings.

    Older files have ``rope_theta`` and ``rope_scaling`` at top level. Newer files have one object, ``rope_parameters``.
    """
    objects = {key: values.OBJECT for key in ("rope_parameters", "rope_scaling")}
    if problems := values.problems(hf, objects):
        raise ValueError("; ".join(problems))
    if hf.get("rope_parameters") and hf.get("rope_scaling"):
        if {**hf["rope_parameters"]} != {**hf["rope_parameters"], **hf["rope_scaling"]}:
            raise ValueError("rope_parameters and rope_scaling are both given, and they differ; keep one")
    # Null means that the key is absent, as elsewhere. So a factor of null counts as missing.
    rope = {k: v for k, v in (hf.get("rope_parameters") or hf.get("rope_scaling") or {}).items() if v is not None}
    theta = _read_theta(hf.get("rope_theta"), rope.pop("rope_theta", None))
    kind = _read_kind(rope)
    rope.pop("finetuned", None)  # how the weights were trained has no effect on the model
    rope.pop("partial_rotary_factor", None) if rope.get("partial_rotary_factor") in (1, 1.0) else None
    if kind == "default":
        if rope:
            raise ValueError(f"rope scaling gives {sorted(rope)} but no rope_type that reads them")
        return theta, None
    if kind not in _ROPE_NEEDED:
        reason = _ROPE_REFUSED.get(kind, f"known kinds are default, {', '.join(_ROPE_NEEDED)}")
        raise ValueError(f"rope scaling {kind!r} is not implemented: {reason}")
    fields = values.ROPE_FIELDS[kind]
    if unknown := sorted(set(rope) - fields):
        raise ValueError(f"rope scaling {kind!r} gives {unknown}, which is unknown; it takes {sorted(fields)}")
    if missing := [key for key in _ROPE_NEEDED[kind] if key not in rope]:
        raise ValueError(f"rope scaling {kind!r}: {' and '.join(missing)} is missing, got {rope}")
    if kind != "linear":
        rope.setdefault("original_max_position_embeddings", max_position)
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"rope_theta must be greater than 1 under yarn scaling, got {theta}")
    return theta, RopeScaling(kind=kind, **rope)


_ROPE_NEEDED = {"linear": ["factor"], "yarn": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}


def _read_theta(outer: Any, inner: Any) -> float:
    given = [theta for theta in (outer, inner) if theta is not None]
    if bad := [theta for theta in given if not values.POSITIVE.holds(theta)]:
        raise ValueError(values.POSITIVE.problem("rope_theta", bad[0]))
    if len(set(given)) > 1:
        raise ValueError(
            f"rope_theta twice, with different values: {given[0]} at top level, {given[1]} inside rope_parameters; "
            "keep the right one"
        )
    return float(given[0]) if given else 10000.0


def _read_kind(rope: dict[str, Any]) -> str:
    """Takes the scaling's kind out of its object. The key is ``rope_type``, in older files ``type``."""
    given = [kind for kind in (rope.pop("rope_type", None), rope.pop("type", None)) if kind is not None]
    if bad := [kind for kind in given if not values.TEXT.holds(kind)]:
        raise ValueError(values.TEXT.problem("rope_type", bad[0]))
    if len(set(given)) > 1:
        raise ValueError(f"two rope types are named: {sorted(given)}; keep one")
    return given[0] if given else "default"
