"""Configurations of Llama's relatives and of GPT-2: published files are read, and each bad key has one clear error."""

import pytest

from specjax.models.config import LlamaConfig
from specjax.models.configs import from_dict, from_hf

SHAPE = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 48, "n_layer": 2, "n_head": 4, "bos_token_id": 0,
        "eos_token_id": 0}  # fmt: skip
ENDS = {"bos_token_id": None, "eos_token_id": 2}


def of(model_type, **changes):
    return {**SHAPE, **ENDS, "model_type": model_type, **changes}


LAYERS = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    "hf, expected",
    [
        (of("qwen2", use_sliding_window=False, sliding_window=8, max_window_layers=2), dict(local_layers=())),
        (of("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=3), dict(local_layers=(3,))),
        (of("qwen2"), dict(qkv_bias=True, attention_bias=False, sliding_window=None)),
        (of("qwen3", attention_bias=True), dict(qk_norm=True, attention_bias=True)),
        (of("qwen3", use_sliding_window=True, sliding_window=8, layer_types=LAYERS), dict(local_layers=(0, 2))),
        (of("mistral"), dict(local_layers=(0, 1, 2, 3), sliding_window=4096)),
        (of("mistral", sliding_window=None), dict(local_layers=(), sliding_window=None)),
        (of("smollm3"), dict(unrotated_layers=(3,), rope_theta=2e6, tie_word_embeddings=True)),
        (of("smollm3", no_rope_layers=[0, 1, 1, 0]), dict(unrotated_layers=(0, 3))),
        (of("smollm3", pretraining_tp=2), dict(model_type="smollm3")),
        (of("gemma2"), dict(local_layers=(0, 2), query_pre_attn_scalar=256, attn_logit_softcapping=50.0)),
        (of("gemma2", attn_logit_softcapping=None), dict(attn_logit_softcapping=None, final_logit_softcapping=30.0)),
        (of("gemma2", tie_word_embeddings=None), dict(tie_word_embeddings=True)),
        (of("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=None), dict(local_layers=())),
        (of("gemma2", head_dim=None), dict(head_dim=12, hidden_act="gelu_pytorch_tanh")),
        (of("gemma3_text", sliding_window_pattern=2), dict(local_layers=(0, 2), rope_theta=1e6, qk_norm=True)),
        (of("gemma3_text", rope_local_base_freq=500, rope_theta=2e4), dict(rope_local_base_freq=500, rope_theta=2e4)),
        (
            of("gemma3_text", rope_parameters={"full_attention": {"rope_theta": 2e4, "rope_type": "default"},
                                               "sliding_attention": {"rope_theta": 5e2, "rope_type": "default"}}),
            dict(rope_local_base_freq=5e2, rope_theta=2e4),
        ),
        (GPT2, dict(intermediate_size=192, max_position_embeddings=1024, eos_token_ids=(0,))),
        (GPT2 | {"n_inner": 100, "n_positions": 32, "n_ctx": 32}, dict(intermediate_size=100)),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_file_leaves_out_is_what_transformers_takes(hf, expected):
    config = from_hf(hf)
    assert {name: getattr(config, name) for name in expected} == expected
    assert from_dict(config.to_dict()) == config and hash(config) == hash(from_hf(dict(hf)))


@pytest.mark.parametrize(
    "hf, message",
    [
        (of("mixtral"), "model_type = 'mixtral' is not implemented .only llama, mistral, qwen2,.*, gpt2 and t5"),
        (of("qwen2", attention_bias=True), "attention_bias = True is not implemented .only null"),
        (of("qwen2", use_sliding_window=True, sliding_window=0), "sliding_window must be a positive integer.*, got 0"),
        (of("qwen2", use_sliding_window="no"), "use_sliding_window must be true or false, got 'no'"),
        (of("qwen2", max_window_layers=-1), "max_window_layers must be an integer from 0 up, got -1"),
        (of("qwen2", sliding_window=8, layer_types=LAYERS), "sliding_attention, but use_sliding_window is false"),
        (of("qwen3", layer_types=["chunked_attention"] * 4), "layer_types must be a list of 'full_attention' and"),
        (of("qwen3", layer_types=["full_attention"] * 3), "layer_types must have an entry for each of 4 layers, got 3"),
        (of("mistral", layer_types=LAYERS), "layer_types = .* is not implemented .only null"),
        (of("mistral", sliding_window="wide"), "sliding_window must be a positive integer"),
        (of("mistral", attention_bias=True), "attention_bias = True is not implemented"),
        (of("smollm3", no_rope_layers=[1, 0]), "no_rope_layers must have an entry for each of 4 layers, got 2"),
        (of("smollm3", no_rope_layers=[1, 0, 2, 1]), "no_rope_layers must be a list of 0 and 1"),
        (of("smollm3", no_rope_layer_interval=0), "no_rope_layer_interval must be a positive integer"),
        (of("gemma2", hidden_activation="gelu"), "hidden_activation = 'gelu' is not implemented"),
        (of("gemma2", hidden_act="silu"), "hidden_act = 'silu' is not implemented"),
        (of("gemma2", attn_logit_softcapping=0), "attn_logit_softcapping must be a positive number, got 0"),
        (of("gemma2", query_pre_attn_scalar=-1), "query_pre_attn_scalar must be a positive number, got -1"),
        (of("gemma2", sliding_window=None, layer_types=LAYERS), "sliding_attention, but sliding_window is missing"),
        (of("gemma2", use_bidirectional_attention=True), "use_bidirectional_attention = True is not implemented"),
        (of("gemma3_text", attn_logit_softcapping=50.0), "attn_logit_softcapping = 50.0 is not implemented"),
        (of("gemma3_text", sliding_window_pattern="6"), "sliding_window_pattern must be a positive integer"),
        (of("gemma3_text", rope_local_base_freq=0), "rope_local_base_freq must be a positive number"),
        (
            of("gemma3_text", rope_parameters={"full_attention": {"rope_theta": 1e6, "rope_type": "default"},
                                               "sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
            "full_attention",
        ),
        (
            of("gemma3_text", rope_parameters={"full_attention": {"rope_theta": 1e6, "rope_type": "default"},
                                               "sliding_attention": {"rope_type": "dynamic"}}),
            "full_attention",
        ),
        (of("llama", sliding_window=8), "sliding_window = 8 is not implemented"),
        (of("llama", query_pre_attn_scalar=8), "query_pre_attn_scalar = 8 is unknown"),
        (GPT2 | {"n_embd": None}, "n_embd is missing"),
        (GPT2 | {"n_head": 5}, "hidden_size .48. must be a multiple of num_attention_heads .5."),
        (GPT2 | {"activation_function": "relu"}, "activation_function = 'relu' is not implemented"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True is not implemented"),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights = False is not implemented"),
        (GPT2 | {"tie_word_embeddings": False}, "tie_word_embeddings = False is not implemented"),
        (GPT2 | {"layer_norm_epsilon": 0}, "layer_norm_epsilon must be a positive number, got 0"),
        (GPT2 | {"rope_theta": 1e4}, "rope_theta = 10000.0 is unknown"),
        (GPT2 | {"eos_token_id": 64}, "eos_token_id must be an id from 0 to 63"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention = True is not implemented"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(hf, message):
    with pytest.raises(ValueError, match=message) as error:
        from_hf(hf)
    assert len(str(error.value).strip().splitlines()) <= 2, "one fault, one sentence"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "bert"}, "model_type must be one of llama, mistral.*, got 'bert'"),
        ({"local_layers": (0,)}, "sliding_window must be given"),
        ({"hidden_act": "relu"}, "hidden_act must be 'silu' or 'gelu_pytorch_tanh', got 'relu'"),
        ({"local_layers": (-1,), "sliding_window": 4}, "local_layers must be numbers of layers"),
        ({"qk_norm": 1}, "qk_norm must be true or false, got 1"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping must be a positive number"),
    ],
    ids=str,
)
def test_configurations_made_in_python_are_held_to_the_same_rules(changes, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**SHAPE, **changes)


def test_a_model_of_some_layers_keeps_what_each_layer_was():
    config = from_hf(of("gemma3_text", sliding_window_pattern=2, num_hidden_layers=6))
    assert config.local_layers == (0, 2, 4)
    assert config.of_layers((1, 2, 5)).local_layers == (1,)
