"""Shapes of models that are trained from scratch, by name."""

import dataclasses
from typing import Any

from specjax.models.configs import ModelConfig
from specjax.models.gpt2_config import GPT2Config
from specjax.models.t5_config import PRESETS as T5_SHAPES
from specjax.models.t5_config import T5Config


def _gpt2(hidden: int, layers: int, heads: int, learning_rate: float) -> "Preset":
    sizes = dict(hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=heads)
    return Preset(GPT2Config, sizes, learning_rate)


def _t5(learning_rate: float, **sizes: int) -> "Preset":
    """T5 1.1 small, with other sizes."""
    small = T5_SHAPES["t5-small"].to_dict()
    of_text = {"vocab_size", "eos_token_ids", "max_position_embeddings"}
    return Preset(T5Config, {name: x for name, x in small.items() if name not in of_text} | sizes, learning_rate)


@dataclasses.dataclass(frozen=True)
class Preset:
    """A shape, and the learning rate with which a model of this shape is trained."""

    # The class of the configuration.
    family: Any
    # The fields of the configuration, without what follows from the tokenizer and the rows.
    sizes: dict[str, Any]
    # The largest learning rate of AdamW.
    learning_rate: float

    def config(self, vocab: int, end: int, longest: int) -> ModelConfig:
        """The configuration for a vocabulary, the id of the end token, and the longest text in tokens."""
        return self.family(
            vocab_size=vocab, eos_token_ids=(end,), max_position_embeddings=longest, **self.sizes
        )


# 97m and 6m have the sizes of Leviathan et al. 2023, section 4.2. t5-small-like has those of T5 1.1 small (Raffel et
# al. 2020). The others are for drafts, and for trying a run out on a CPU.
PRESETS = {
    "97m": _gpt2(768, 12, 12, 6e-4),
    "6m": _gpt2(256, 2, 4, 2e-3),
    "gpt2-tiny": _gpt2(64, 2, 2, 5e-3),
    "t5-small-like": _t5(1e-3),
    "t5-mini-2-layers": _t5(
        2e-3, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_encoder_layers=2, num_attention_heads=4
    ),
    "t5-tiny": _t5(
        5e-3, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_encoder_layers=2, num_attention_heads=2
    ),
}
