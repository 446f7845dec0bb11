"""The closed table of the keys that a Hugging Face ``config.json`` may have. A key that no list here has is refused."""

from collections.abc import Mapping
from typing import Any

from specjax.models.relatives import Family

# Keys that are read into the configuration.
READ = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters tie_word_embeddings "
    "attention_bias mlp_bias model_type".split()
)
# Keys that say how the model was made, stored or called. The model's logits are the same without them.
_ABOUT = frozenset(
    "_name_or_path architectures auto_map torch_dtype dtype transformers_version use_cache initializer_range "
    "pad_token_id attention_dropout hidden_dropout is_llama_config transformers.js_config id2label label2id "
    "num_labels problem_type task_specific_params return_dict output_hidden_states output_attentions torchscript "
    "use_bfloat16 tokenizer_class prefix chunk_size_feed_forward finetuning_task tf_legacy_loss "
    "name_or_path bos_token_id eos_token_id max_sequence_length model_max_length unsloth_version unsloth_fixed "
    "use_return_dict _attn_implementation_autoset _attn_implementation attn_implementation unk_token_id sep_token_id "
    "mask_token_id cls_token_id gradient_checkpointing _flash_attn_2_enabled use_flash_attention mlp_dropout "
    "embd_pdrop resid_pdrop attn_pdrop neftune_noise_alpha max_window_layers keys_to_ignore_at_inference".split()
)
# Options of transformers' ``generate``, which older releases stored beside the model's shape. specjax ignores them: its
# options come from ``specjax.Options`` alone.
_GENERATION = frozenset(
    "max_length max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings do_sample num_beams "
    "num_beam_groups cache_implementation cache_config temperature top_k top_p min_p top_h typical_p epsilon_cutoff "
    "eta_cutoff diversity_penalty repetition_penalty encoder_repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids force_words_ids renormalize_logits constraints forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    "forced_decoder_ids sequence_bias token_healing guidance_scale low_memory watermarking_config "
    "num_return_sequences output_scores output_logits return_dict_in_generate decoder_start_token_id "
    "num_assistant_tokens num_assistant_tokens_schedule prompt_lookup_num_tokens max_matching_ngram_size "
    "penalty_alpha dola_layers prefill_chunk_size compile_config disable_compile is_assistant use_mtp".split()
)
IGNORED = _ABOUT | _GENERATION
# Keys for which only the listed values are implemented. An empty list: the key must be absent or null.
REQUIRED: dict[str, tuple] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, 1.0),
    "use_sliding_window": (False,),
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


def refused(hf: Mapping[str, Any], reads: frozenset[str], of_family: Mapping[str, tuple]) -> list[str]:
    """A sentence for each key, or value of a key, that specjax does not implement. A null counts as an absent key.

    Args:
      hf: the contents of ``config.json``.
      reads: the keys that the family reads.
      of_family: the family's own entries of ``REQUIRED``. They win over all other lists.
    """
    problems = []
    for key, value in hf.items():
        only = of_family.get(key, REQUIRED.get(key))
        if value is None or (key in reads | IGNORED and key not in of_family):
            continue
        if only is not None:
            if value not in only:
                implemented = " or ".join(repr(v) for v in only) or "null"
                problems.append(f"{key} = {value!r} is not implemented (only {implemented})")
        elif key in _JUDGED:
            problems += _JUDGED[key](hf)
        else:
            problems.append(f"{key} = {value!r} is unknown to specjax, so its effect on the model can't be ruled out")
    return problems


def lists_of_layers(hf: Mapping[str, Any], family: Family) -> list[str]:
    """A sentence for each list that doesn't fit the layers or the window. Only lists that the family reads count."""
    layers, lists = hf["num_hidden_layers"], {"layer_types", "no_rope_layers"} & family.reads
    given = [key for key in sorted(lists) if hf.get(key) is not None]
    wrong = [key for key in given if len(hf[key]) != layers]
    problems = [f"{key} must have an entry for each of {layers} layers, got {len(hf[key])}" for key in wrong]
    if "layer_types" in given and "sliding_attention" in hf["layer_types"]:
        off = hf.get("use_sliding_window") is False
        if off or hf.get("sliding_window") is None:
            why = "use_sliding_window is false" if off else "sliding_window is missing"
            problems.append(f"layer_types names layers of sliding_attention, but {why}")
    return problems


def _layer_types(hf: Mapping[str, Any]) -> list[str]:
    value, layers = hf["layer_types"], hf.get("num_hidden_layers")
    if isinstance(value, list) and all(kind == "full_attention" for kind in value) and len(value) == layers:
        return []
    return [f"layer_types = {str(value)[:200]} is not implemented (only 'full_attention' for each of {layers} layers)"]


def _sliding_window(hf: Mapping[str, Any]) -> list[str]:
    # A window has no effect if no layer uses it.
    if hf.get("use_sliding_window") is False or (hf.get("layer_types") is not None and not _layer_types(hf)):
        return []
    return [f"sliding_window = {hf['sliding_window']!r} is not implemented (only null, or use_sliding_window = false)"]


def _quantization(hf: Mapping[str, Any]) -> list[str]:
    value = hf["quantization_config"]
    if isinstance(value, Mapping) and all(map(_is_off, value, value.values())):
        return []
    return [
        f"quantization_config = {str(value)[:200]} is not implemented (only null, or bitsandbytes with "
        "load_in_4bit and load_in_8bit both false); use the model's unquantised checkpoint"
    ]


def _is_off(key: str, value: Any) -> bool:
    # Two switches of bitsandbytes say whether the model is quantised. Its other parameters only say how.
    if key.removeprefix("_") in ("load_in_4bit", "load_in_8bit"):
        return value is False or value is None
    if key == "quant_method":
        return value in ("bitsandbytes", None)
    return value is None or key.startswith(("bnb_4bit_", "llm_int8_"))


_JUDGED = {"layer_types": _layer_types, "sliding_window": _sliding_window, "quantization_config": _quantization}
