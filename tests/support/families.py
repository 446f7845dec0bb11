"""One tiny model of each family: a few tokens, so that laws can be enumerated, and a window of 3, so that short texts
reach past it."""

import dataclasses

from specjax import testing
from specjax.models.gpt2_config import GPT2Config
from specjax.models.lm import LM
from specjax.models.relatives import FAMILIES
from specjax.models.t5_config import T5Config

_WINDOW = {"sliding_window": 3, "local_layers": (0,)}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
# Name -> the features that are not the same in every model of the family.
FEATURES = {
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 3, "local_layers": (0, 1)},
    "smollm3": {"unrotated_layers": (1,)},
    "gemma2": {**_WINDOW, **_CAPS, "query_pre_attn_scalar": 9.0},
    "gemma3_text": {**_WINDOW, "rope_local_base_freq": 100.0},
}
DECODERS = [*FEATURES, "gpt2"]
NAMES = [*DECODERS, "t5"]


def tiny(name: str, seed: int = 0, vocab_size: int = 4, std: float = 0.7, **sizes) -> LM:
    """A random model of a family, of two layers. Its norms and biases are random too."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, **sizes}
    if name == "gpt2":
        config = GPT2Config(vocab_size, max_position_embeddings=256, **sizes)
        lm = LM(config, testing.random_params(config, seed, std))
    elif name == "t5":
        shape = {"head_dim": 4, "num_encoder_layers": 1, "num_buckets": 4, "max_distance": 5, **sizes}
        shape |= {"max_position_embeddings": 256, "tie_word_embeddings": False, "scaled_head": False}
        config = T5Config(vocab_size, **shape)
        lm = LM(config, testing.random_params(config, seed, std))
    else:
        features = {**FAMILIES[name].sets, **FEATURES[name], "model_type": name}
        shape = {"num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": "gemma" in name, **sizes}
        lm = testing.tiny_lm(seed, std, vocab_size=vocab_size, **features, **shape)
    noise = testing.noisy_twin(lm, 0.3, seed + 100).params
    params = {**lm.params, **{name: noise[name] for name in ("encoder", "layers", "norm") if name in noise}}
    return dataclasses.replace(lm, params=params)
