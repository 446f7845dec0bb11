"""The configuration of GPT-2, and how it is read from a Hugging Face ``config.json``."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from specjax.models import config_keys as keys
from specjax.models import config_values as values

_SIZES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}
_RULES = {
    **dict.fromkeys(("vocab_size", *_SIZES), values.COUNT),
    "layer_norm_epsilon": values.POSITIVE,
    "tie_word_embeddings": values.FLAG,
}
_ONLY = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "tie_word_embeddings": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
}
# Keys that transformers reads into no layer: an older name of n_positions, and a head for classification.
_IGNORED = frozenset(
    "n_ctx summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout".split()
)
_DEFAULTS = {"n_positions": 1024, "layer_norm_epsilon": 1e-5, "bos_token_id": 50256, "eos_token_id": 50256}


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """Shape and constants of a GPT-2. The names are those of :class:`specjax.models.config.LlamaConfig`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int = 1024
    layer_norm_epsilon: float = 1e-5
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = "gpt2"
    tie_word_embeddings: ClassVar[bool] = True  # the output head is the embedding
    embedding_scale: ClassVar[None] = None
    start_ids: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        given = {name: getattr(self, name) for name in ("vocab_size", *_SIZES.values(), "layer_norm_epsilon")}
        rules = {**values.SIZES, "layer_norm_epsilon": values.POSITIVE}
        problems = [rules[name].problem(name, None) for name in given if given[name] is None]
        problems += values.problems(given, rules)
        if not problems and self.hidden_size % self.num_attention_heads:
            problems.append(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads})"
            )
        if problems:
            raise ValueError(f"config: {'; '.join(problems)}")

    @property
    def num_key_value_heads(self) -> int:
        """Each query head has its own key/value head."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """The size of a head."""
        return self.hidden_size // self.num_attention_heads

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; :meth:`from_dict` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "GPT2Config":
        """The inverse of :meth:`to_dict`."""
        return cls(**{**data, "eos_token_ids": tuple(data.get("eos_token_ids", ()))})


def from_hf(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> GPT2Config:
    """The configuration that a GPT-2's ``config.json`` describes. Arguments and errors as for Llama's ``from_hf``."""
    hf = {**_DEFAULTS, **{key: value for key, value in hf.items() if value is not None or key.endswith("token_id")}}
    problems = [f"{key} is missing" for key in ("vocab_size", "n_embd", "n_layer", "n_head") if hf.get(key) is None]
    problems += keys.refused(hf, frozenset(_RULES) | _IGNORED | {"model_type"}, _ONLY) + values.problems(hf, _RULES)
    problems = problems or values.problems_of_ids(hf, generation or {})
    if problems:
        raise ValueError("config.json can't be used:\n  " + "\n  ".join(problems))
    bos, eos = values.special_ids(hf, generation or {})
    sizes = {name: hf.get(key, 4 * hf["n_embd"]) for key, name in _SIZES.items()}  # only n_inner may be absent here
    return GPT2Config(hf["vocab_size"], **sizes, layer_norm_epsilon=hf["layer_norm_epsilon"], bos_token_id=bos,
                      eos_token_ids=eos)  # fmt: skip


def to_hf(config: GPT2Config) -> dict[str, Any]:
    """A Hugging Face ``config.json`` of this model. :func:`from_hf` is the inverse."""
    return {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        **{key: getattr(config, name) for key, name in _SIZES.items()},
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
