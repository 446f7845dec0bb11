"""What ``from_hf`` reads, and what it refuses by name."""

import json

import pytest

from specjax.models.config import PRESETS, LlamaConfig, RopeScaling, from_hf, to_hf

MINIMAL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip

# The keys that these checkpoints' config.json have, sizes included.
LLAMA_2_7B = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
LLAMA_3_1_8B_INSTRUCT = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
LLAMA_3_2_1B = LLAMA_3_1_8B_INSTRUCT | {
    "eos_token_id": 128001, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "rope_scaling": LLAMA3 | {"factor": 32.0}, "tie_word_embeddings": True, "transformers_version": "4.45.0.dev0",
}  # fmt: skip
TINYLLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
    "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 22,
    "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.35.0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}, "use_cache": True,
    "vocab_size": 49152,
}  # fmt: skip


@pytest.mark.parametrize("hf,expected", [
    (LLAMA_2_7B, {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 1e4, "eos_token_ids": (2,)}),
    (LLAMA_3_1_8B_INSTRUCT, {
        "num_key_value_heads": 8, "group_size": 4, "rope_theta": 5e5, "eos_token_ids": (128001, 128008, 128009),
        "rope_scaling": RopeScaling("llama3", 8.0, 8192, 1.0, 4.0),
    }),
    (LLAMA_3_2_1B, {"head_dim": 64, "tie_word_embeddings": True, "rope_scaling": RopeScaling("llama3", 32.0, 8192)}),
    (TINYLLAMA, {"num_key_value_heads": 4, "head_dim": 64, "rope_scaling": None, "bos_token_id": 1}),
    (SMOLLM2, {"head_dim": 64, "rope_theta": 1e5, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
], ids=["llama-2-7b", "llama-3.1-8b-instruct", "llama-3.2-1b", "tinyllama", "smollm2"])  # fmt: skip
def test_real_checkpoints_are_accepted_and_survive_a_round_trip(hf, expected):
    config = from_hf(hf)
    assert {name: getattr(config, name) for name in expected} == expected
    assert LlamaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config) == hash(from_hf(dict(hf)))  # static under jit


@pytest.mark.parametrize("extra", [
    {"rope_theta": 500000.0},
    {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
    {"rope_theta": 500000, "rope_parameters": {"rope_theta": 500000.0}},
])  # fmt: skip
def test_theta_is_found_in_either_place(extra):
    assert from_hf(MINIMAL | extra).rope_theta == 500000.0


def test_theta_absent_is_10000_and_contradiction_is_refused():
    assert from_hf(MINIMAL).rope_theta == from_hf(MINIMAL | {"rope_theta": None}).rope_theta == 10000.0
    with pytest.raises(ValueError, match="rope_theta twice.*500000.*10000"):
        from_hf(MINIMAL | {"rope_theta": 500000.0, "rope_parameters": {"rope_theta": 10000.0}})


def test_rope_scaling_in_either_place_under_either_name():
    kept = from_hf(MINIMAL | {"rope_scaling": LLAMA3, "rope_theta": 5e5})
    assert from_hf(MINIMAL | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}) == kept
    assert from_hf(MINIMAL | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "rope_scaling": LLAMA3}) == kept
    linear = {"type": "linear", "factor": 2.0}
    assert from_hf(MINIMAL | {"rope_scaling": linear}).rope_scaling == RopeScaling("linear", 2.0)
    assert from_hf(MINIMAL | {"rope_scaling": linear | {"rope_type": "linear"}}).rope_scaling.factor == 2.0


@pytest.mark.parametrize("extra,message", [
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "'longrope' is not implemented"),
    ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "'su' is not implemented"),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "two rope types.*linear.*yarn"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": None}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 1}}, "beta_fast"),
    ({"rope_scaling": {"factor": 2.0}}, "type"),
    ({"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"factor": 2.0}}, "rope_parameters and rope_scaling"),
], ids=str)  # fmt: skip
def test_rope_scaling_that_is_not_understood_is_refused(extra, message):
    with pytest.raises(ValueError, match=message):
        from_hf(MINIMAL | extra)


def test_yarn_original_length_defaults_to_the_maximum():
    scaling = {"rope_type": "yarn", "factor": 2.0, "beta_fast": None}
    config = from_hf(MINIMAL | {"rope_scaling": scaling, "max_position_embeddings": 4096})
    assert config.rope_scaling == RopeScaling("yarn", 2.0, 4096)


def test_an_explicit_head_dim_is_read_and_an_absent_one_must_divide():
    explicit = MINIMAL | {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16}
    assert from_hf(explicit).head_dim == 16
    assert from_hf(MINIMAL).head_dim == from_hf(MINIMAL | {"head_dim": None}).head_dim == 12
    with pytest.raises(ValueError, match="hidden_size.*50.*num_attention_heads.*4.*head_dim"):
        from_hf(MINIMAL | {"hidden_size": 50})


@pytest.mark.parametrize("extra,message", [
    ({"sliding_window": 16}, "sliding_window = 16"),  # a ring buffer can't be rewound
    ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"pretraining_tp": 2}, "pretraining_tp = 2"),
    ({"rope_interleaved": True}, "rope_interleaved"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"model_type": "mixtral"}, "model_type = 'mixtral'"),
    ({"model_type": None}, "model_type is missing"),
    ({"clip_qkv": 8.0}, "clip_qkv = 8.0 is unknown"),
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
    ({"num_hidden_layers": 2.0}, "num_hidden_layers must be a positive integer"),
    ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
    ({"head_dim": 5}, "head_dim must be even"),
], ids=str)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(extra, message):
    with pytest.raises(ValueError, match=message):
        from_hf(MINIMAL | extra)


def test_every_problem_is_named_at_once():
    with pytest.raises(ValueError) as error:
        from_hf(MINIMAL | {"sliding_window": 16, "alibi": True, "hidden_size": None})
    assert all(word in str(error.value) for word in ("sliding_window", "alibi", "hidden_size"))


NAN, INF = float("nan"), float("inf")
YARN = {"rope_type": "yarn", "factor": 2.0}


def rope(**changes):
    return {"rope_scaling": LLAMA3 | changes}


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
                                 "num_attention_heads", "num_key_value_heads", "max_position_embeddings"])  # fmt: skip
@pytest.mark.parametrize("value", [0, False, True, -1, 2.0, "4", [4], {}, 2**31, NAN], ids=str)
def test_every_size_is_a_positive_integer(key, value):
    with pytest.raises(ValueError, match=f"{key} must be a positive integer.*, got ") as error:
        from_hf(MINIMAL | {key: value})
    assert f"{key} must be" in str(error.value) and repr(value) in str(error.value)


@pytest.mark.parametrize("extra,message", [
    ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number, got -1"),
    ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, got 0"),
    ({"rms_norm_eps": NAN}, "rms_norm_eps must be a positive number, got nan"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive number, got '1e-5'"),
    ({"rms_norm_eps": 1e-60}, "rms_norm_eps must be a positive number.*, got 1e-60"),  # 0 in float32
    ({"rope_theta": 0}, "rope_theta must be a positive number, got 0"),
    ({"rope_theta": -1e4}, "rope_theta must be a positive number, got -10000.0"),
    ({"rope_theta": [1e4]}, "rope_theta must be a positive number, got"),
    ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
    ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta must be a positive number, got 'big'"),
    ({"rope_scaling": "linear"}, "rope_scaling must be an object or null, got 'linear'"),
    ({"rope_parameters": [1]}, r"rope_parameters must be an object or null, got \[1\]"),
    ({"rope_scaling": {"rope_type": ["yarn"], "factor": 2.0}}, "rope_type must be text, got"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
    ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
    ({"mlp_bias": []}, r"mlp_bias must be true or false, got \[\]"),
    ({"bos_token_id": "<s>"}, "bos_token_id must be an id from 0 to 63, got '<s>'"),
    ({"bos_token_id": 64}, "bos_token_id must be an id from 0 to 63, got 64"),
    ({"eos_token_id": [2, -1]}, r"eos_token_id must be an id from 0 to 63, or a list of such ids, got \[2, -1\]"),
    ({"eos_token_id": 2.0}, "eos_token_id must be an id"),
    ({"eos_token_id": {"id": 2}}, "eos_token_id must be an id"),
    (rope(factor=0), "factor must be a positive number, got 0"),
    (rope(factor=NAN), "factor must be a positive number, got nan"),
    (rope(factor=-8.0), "factor must be a positive number, got -8.0"),
    (rope(factor=INF), "factor must be a positive number, got inf"),
    (rope(factor="8"), "factor must be a positive number, got '8'"),
    (rope(low_freq_factor=None), "low_freq_factor is missing"),
    (rope(high_freq_factor=None), "high_freq_factor is missing"),
    (rope(low_freq_factor=4.0), "high_freq_factor .4.0. must be greater than low_freq_factor .4.0."),
    (rope(original_max_position_embeddings=0), "original_max_position_embeddings must be a positive integer"),
    ({"rope_scaling": YARN | {"beta_fast": 0}}, "beta_fast must be a positive number, got 0"),
    ({"rope_scaling": YARN | {"beta_slow": 40}}, "beta_fast .32.0. must be greater than beta_slow .40."),
    ({"rope_scaling": YARN | {"mscale": -1}}, "mscale must be a number from 0 up, got -1"),
    ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor must be a positive number, got 0"),
    ({"rope_scaling": YARN | {"truncate": "no"}}, "truncate must be true or false, got 'no'"),
    ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta must be greater than 1 under yarn scaling, got 1.0"),
    ({"layer_types": "full_attention"}, "layer_types"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types"),
    ({"quantization_config": {"load_in_4bit": False, "bits": 4}}, "quantization_config"),
    ({"quantization_config": {"load_in_8bit": True}}, "quantization_config"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"use_sliding_window": True, "sliding_window": 16}, "sliding_window = 16"),
], ids=str)  # fmt: skip
def test_every_value_has_a_type_and_a_range(extra, message):
    with pytest.raises(ValueError, match=message) as error:
        from_hf(MINIMAL | extra)
    assert str(error.value).startswith("config.json can't be used:")


def test_a_value_of_the_generation_config_is_refused_by_the_name_of_that_file():
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id must be an id .*, got 'x'"):
        from_hf(MINIMAL, {"eos_token_id": "x"})


def test_every_bad_value_is_named_at_once():
    with pytest.raises(ValueError) as error:
        from_hf(MINIMAL | {"vocab_size": 0, "rms_norm_eps": -1} | rope(factor=0))
    assert all(f"{key} must be" in str(error.value) for key in ("vocab_size", "rms_norm_eps", "factor"))


def test_configurations_made_in_python_are_held_to_the_same_rules():
    good = from_hf(MINIMAL).to_dict()
    for change in ({"rms_norm_eps": -1.0}, {"rope_theta": 0.0}, {"num_key_value_heads": False}, {"mlp_bias": 1},
                   {"eos_token_ids": ("x",)}, {"rope_scaling": {"kind": "linear", "factor": 0.0}},
                   {"rope_scaling": {"kind": "ntk"}}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(change)).replace("rope_scaling", "rope scaling|factor")):
            LlamaConfig.from_dict({**good, **change})


OFF = {"load_in_4bit": False, "load_in_8bit": False, "quant_method": "bitsandbytes", "llm_int8_threshold": 6.0,
       "bnb_4bit_compute_dtype": "float32", "bnb_4bit_use_double_quant": False, "_load_in_4bit": False}  # fmt: skip


@pytest.mark.parametrize("extra", [
    {"max_length": 4096, "do_sample": True, "temperature": 0.6, "top_p": 0.9, "bad_words_ids": None},
    {"repetition_penalty": 1.1, "num_beams": 1, "suppress_tokens": None, "forced_eos_token_id": 2},
    {"use_sliding_window": False},
    {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    {"layer_types": ["full_attention"] * 2},
    {"layer_types": ["full_attention"] * 2, "sliding_window": 4096},
    {"quantization_config": OFF},
    {"quantization_config": {}},
    {"some_new_key": None},
    {"gradient_checkpointing": False, "unk_token_id": 0, "_flash_attn_2_enabled": True, "pad_token_id": -1},
], ids=str)  # fmt: skip
def test_keys_that_change_nothing_are_ignored(extra):
    assert from_hf(MINIMAL | extra) == from_hf(MINIMAL)


def test_a_mark_that_yarn_was_finetuned_is_ignored():
    plain = from_hf(MINIMAL | {"rope_scaling": YARN})
    assert from_hf(MINIMAL | {"rope_scaling": YARN | {"finetuned": True}}) == plain


@pytest.mark.parametrize("name", ["rms_norm_eps", "max_position_embeddings", "num_key_value_heads", "rope_theta",
                                  "sliding_window", "tie_word_embeddings", "attention_bias", "quantization_config"])
def test_null_counts_as_absent(name):
    assert from_hf(MINIMAL | {name: None}) == from_hf(MINIMAL)


def test_end_of_sequence_ids_come_from_generation_config_first():
    assert from_hf(MINIMAL).eos_token_ids == ()
    assert from_hf(MINIMAL | {"eos_token_id": 2}).eos_token_ids == (2,)
    assert from_hf(MINIMAL | {"eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    assert from_hf(MINIMAL | {"eos_token_id": 2}, {"eos_token_id": [2, 7, 9]}).eos_token_ids == (2, 7, 9)
    assert from_hf(MINIMAL | {"eos_token_id": 0}, {"eos_token_id": None}).eos_token_ids == (0,)
    assert from_hf(MINIMAL | {"bos_token_id": 1}, {"bos_token_id": 0}).bos_token_id == 0


@pytest.mark.parametrize("name", PRESETS)
def test_to_hf_is_the_inverse(name):
    assert from_hf(to_hf(PRESETS[name])) == PRESETS[name]


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling("linear", 4.0),
        RopeScaling("yarn", 2.0, 512, beta_fast=30.0, mscale=0.7, truncate=False),
    ],
)
def test_to_hf_keeps_rope_scaling(scaling):
    config = LlamaConfig(64, 48, 64, 2, 4, 2, 12, rope_scaling=scaling, attention_bias=True, eos_token_ids=(3,))
    assert from_hf(json.loads(json.dumps(to_hf(config)))) == config
