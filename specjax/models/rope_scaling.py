"""Rope scaling: its fields and checks, and how a Hugging Face ``config.json`` spells it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.models import config_values as values


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the trained context. See :mod:`specjax.models.rope`.

    A field that the kind does not use keeps its default. Except for ``kind`` and ``factors``, names and meanings are
    those of Hugging Face.
    """

    kind: str  # "linear", "dynamic", "llama3", "yarn" or "factors"
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


_REFUSED = {"longrope": "its per-dimension factors are not implemented"}
_NEEDED = {
    "linear": ["factor"],
    "dynamic": ["factor"],
    "yarn": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
}


def flat(hf: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` with one set of rotary embeddings in ``rope_parameters``, that of layers without a window.

    Newer files of families with local layers have one set for each kind of layer. The base of local layers then goes
    to ``rope_local_base_freq``, as in older files. A set that says more stays as it is, and is refused as unknown.
    """
    rope = hf.get("rope_parameters")
    if not isinstance(rope, Mapping) or set(rope) != {"full_attention", "sliding_attention"}:
        return dict(hf)
    local = rope["sliding_attention"]
    plain = isinstance(local, Mapping) and set(local) <= {"rope_type", "rope_theta"}
    if not plain or local.get("rope_type", "default") != "default":
        return dict(hf)
    base = {} if local.get("rope_theta") is None else {"rope_local_base_freq": local["rope_theta"]}
    return {**hf, **base, "rope_parameters": rope["full_attention"]}


def read(hf: Mapping[str, Any], max_position: int, theta: float) -> tuple[float, RopeScaling | None]:
    """(theta, scaling), from either of two spellings. The argument ``theta`` is the base where the file gives none.

    Older files have ``rope_theta`` and ``rope_scaling`` at top level. Newer files have one object, ``rope_parameters``.

    Raises:
      ValueError: the file contradicts itself, or says what is not implemented.
    """
    objects = {key: values.OBJECT for key in ("rope_parameters", "rope_scaling")}
    if problems := values.problems(hf, objects):
        raise ValueError("; ".join(problems))
    if hf.get("rope_parameters") and hf.get("rope_scaling"):
        if {**hf["rope_parameters"]} != {**hf["rope_parameters"], **hf["rope_scaling"]}:
            raise ValueError("rope_parameters and rope_scaling are both given, and they differ; keep one")
    # Null means that the key is absent, as elsewhere. So a factor of null counts as missing.
    rope = {k: v for k, v in (hf.get("rope_parameters") or hf.get("rope_scaling") or {}).items() if v is not None}
    theta = _read_theta(hf.get("rope_theta"), rope.pop("rope_theta", None), theta)
    kind = _read_kind(rope)
    rope.pop("finetuned", None)  # how the weights were trained has no effect on the model
    rope.pop("partial_rotary_factor", None) if rope.get("partial_rotary_factor") in (1, 1.0) else None
    if kind == "default":
        if rope:
            raise ValueError(f"rope scaling gives {sorted(rope)} but no rope_type that reads them")
        return theta, None
    if kind not in _NEEDED:
        reason = _REFUSED.get(kind, f"known kinds are default, {', '.join(_NEEDED)}")
        raise ValueError(f"rope scaling {kind!r} is not implemented: {reason}")
    fields = values.ROPE_FIELDS[kind]
    if unknown := sorted(set(rope) - fields):
        raise ValueError(f"rope scaling {kind!r} gives {unknown}, which is unknown; it takes {sorted(fields)}")
    if missing := [key for key in _NEEDED[kind] if key not in rope]:
        raise ValueError(f"rope scaling {kind!r}: {' and '.join(missing)} is missing, got {rope}")
    if "original_max_position_embeddings" in fields:
        rope.setdefault("original_max_position_embeddings", max_position)
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"rope_theta must be greater than 1 under yarn scaling, got {theta}")
    return theta, RopeScaling(kind=kind, **rope)


def _read_theta(outer: Any, inner: Any, absent: float) -> float:
    given = [theta for theta in (outer, inner) if theta is not None]
    if bad := [theta for theta in given if not values.POSITIVE.holds(theta)]:
        raise ValueError(values.POSITIVE.problem("rope_theta", bad[0]))
    if len(set(given)) > 1:
        raise ValueError(
            f"rope_theta twice, with different values: {given[0]} at top level, {given[1]} inside rope_parameters; "
            "keep the right one"
        )
    return float(given[0]) if given else absent


def _read_kind(rope: dict[str, Any]) -> str:
    """Takes the scaling's kind out of its object. The key is ``rope_type``, in older files ``type``."""
    given = [kind for kind in (rope.pop("rope_type", None), rope.pop("type", None)) if kind is not None]
    if bad := [kind for kind in given if not values.TEXT.holds(kind)]:
        raise ValueError(values.TEXT.problem("rope_type", bad[0]))
    if len(set(given)) > 1:
        raise ValueError(f"two rope types are named: {sorted(given)}; keep one")
    return given[0] if given else "default"


def to_hf(config: Any) -> dict[str, Any]:
    """``rope_parameters`` of a ``LlamaConfig``. :func:`read` is the inverse, except for ``factors`` scaling."""
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
    if config.rope_local_base_freq is None:
        return rope
    local = {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
    return {"full_attention": rope, "sliding_attention": local}
