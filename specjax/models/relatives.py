"""Llama's relatives: what each ``model_type`` of ``config.json`` does otherwise than Llama. One row for each family.

Features are fields of :class:`specjax.models.config.LlamaConfig`. Some are the same in every model of a family
(``sets``), others differ from checkpoint to checkpoint and are read from ``config.json`` (``reads``).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Json = Mapping[str, Any]
GELU = "gelu_pytorch_tanh"


class Family(NamedTuple):
    """What differs from Llama."""

    sets: dict[str, Any] = {}  # fields of LlamaConfig that every model of the family has
    defaults: dict[str, Any] = {}  # the values of keys that config.json leaves out, as in transformers
    reads: frozenset[str] = frozenset()  # keys that are read besides Llama's
    only: dict[str, tuple] = {}  # keys for which only these values are implemented; (): the key must be absent
    local: Callable[[Json], list[int]] = lambda hf: []  # the layers with a window, where config.json doesn't name them
    theta: float = 10000.0  # the base of the rotary embeddings, where config.json gives none


def _every(hf: Json) -> list[int]:
    return list(range(hf["num_hidden_layers"]))


def _upper(hf: Json) -> list[int]:
    return list(range(hf["max_window_layers"], hf["num_hidden_layers"])) if hf["use_sliding_window"] else []


def _all_but_each(count: Callable[[Json], int]) -> Callable[[Json], list[int]]:
    return lambda hf: [i for i in _every(hf) if (i + 1) % count(hf)]


def _unrotated(hf: Json) -> list[int]:
    return list(unrotated_layers(hf)) if hf["use_sliding_window"] else []


def unrotated_layers(hf: Json) -> tuple[int, ...]:
    """The layers whose queries and keys are not rotated: those with a 0 in ``no_rope_layers``, else each n-th."""
    flags, each = hf.get("no_rope_layers"), hf.get("no_rope_layer_interval")
    if flags is None:
        flags = [] if each is None else [(i + 1) % each for i in _every(hf)]
    return tuple(i for i, rotated in enumerate(flags) if not rotated)


_WINDOWS = frozenset({"sliding_window", "layer_types"})
_SWITCH = frozenset({"use_sliding_window", "max_window_layers"})
_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GEMMA_SETS = {"hidden_act": GELU, "norm_plus_one": True, "scaled_embedding": True, "post_norms": True}
_GEMMA_READS = _WINDOWS | {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
_GEMMA_ONLY = {"hidden_act": (GELU,), "hidden_activation": (GELU,), "use_bidirectional_attention": (False,)}

FAMILIES = {
    "llama": Family(),
    "mistral": Family(
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        reads=frozenset({"sliding_window"}),
        only={"attention_bias": (False,), "mlp_bias": (False,), "layer_types": ()},
        local=_every,
    ),
    "qwen2": Family(
        sets={"qkv_bias": True},
        defaults=_QWEN,
        reads=_WINDOWS | _SWITCH,
        only={"attention_bias": (), "mlp_bias": (False,)},
        local=_upper,
    ),
    "qwen3": Family(
        sets={"qk_norm": True},
        defaults=_QWEN | {"head_dim": 128},
        reads=_WINDOWS | _SWITCH,
        only={"mlp_bias": (False,)},
        local=_upper,
    ),
    "smollm3": Family(
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        reads=_WINDOWS | {"use_sliding_window", "no_rope_layers", "no_rope_layer_interval"},
        only={"pretraining_tp": (1, 2)},  # no layer of this family reads it, and the published checkpoint says 2
        local=_unrotated,
        theta=2000000.0,
    ),
    "gemma2": Family(
        sets=_GEMMA_SETS,
        defaults=_GEMMA | {
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        reads=_GEMMA_READS,
        only=_GEMMA_ONLY | {"mlp_bias": (False,)},
        local=_all_but_each(lambda hf: 2),
    ),
    "gemma3_text": Family(
        sets=_GEMMA_SETS | {"qk_norm": True},
        defaults=_GEMMA | {
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
        },
        reads=_WINDOWS | {"query_pre_attn_scalar", "final_logit_softcapping"}
        | {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
        only=_GEMMA_ONLY | {"mlp_bias": (False,), "attn_logit_softcapping": ()},
        local=_all_but_each(lambda hf: hf["sliding_window_pattern"]),
        theta=1000000.0,
    ),
}  # fmt: skip


def with_defaults(family: Family, hf: Json) -> dict[str, Any]:
    """``config.json`` with the family's defaults for the keys that it leaves out, or gives as null.

    Of the keys below a null says something itself: no window, cap or special id, or a size that follows from others.
    """
    says = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "bos_token_id", "eos_token_id",
            "head_dim", "num_key_value_heads"}  # fmt: skip
    given = {key: value for key, value in hf.items() if value is not None or key in says}
    return {**family.defaults, **given}


def local_layers(family: Family, hf: Json) -> tuple[int, ...]:
    """The numbers of the layers that see only a window. ``hf`` has the family's defaults in it."""
    types = hf.get("layer_types") if "layer_types" in family.reads else None
    if types is not None:
        return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    return () if hf.get("sliding_window") is None else tuple(family.local(hf))


def to_hf(family: Family, config: Any) -> dict[str, Any]:
    """The keys of ``config.json`` that say which layers of a ``LlamaConfig`` have a window, and which are rotated."""
    layers, keys = range(config.num_hidden_layers), dict[str, Any]()
    if "layer_types" in family.reads:
        keys["layer_types"] = ["sliding_attention" if i in config.local_layers else "full_attention" for i in layers]
    if "use_sliding_window" in family.reads:
        keys["use_sliding_window"] = bool(config.local_layers)
    if "no_rope_layers" in family.reads:
        keys["no_rope_layers"] = [int(i not in config.unrotated_layers) for i in layers]
    for name in ("hidden_act", "hidden_activation"):
        if name in family.only:
            keys[name] = config.hidden_act
    return keys
