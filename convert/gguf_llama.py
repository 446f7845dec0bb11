"""Llama in GGUF: its metadata as a config, and its tensors under their Hugging Face names."""

from collections.abc import Iterator

import numpy as np

from convert.gguf import GGUF
from specjax.config import LlamaConfig, RopeScaling

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
# What this reader uses or may ignore; any other llama.* key could change the model.
_KNOWN = frozenset(
    "context_length embedding_length block_count feed_forward_length vocab_size attention.head_count "
    "attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length attention.value_length "
    "rope.dimension_count rope.freq_base rope.scale_linear rope.scaling.type rope.scaling.factor "
    "rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.attn_factor tensor_data_layout".split()
)


def read_config(file: GGUF) -> LlamaConfig:
    """The model's shape from metadata and tensor names.

    Raises:
      ValueError: another architecture, or keys that are missing, unknown or of unimplemented value, named.
    """
    arch = file.metadata.get("general.architecture")
    if arch != "llama":
        raise ValueError(f"{file.path}: architecture {arch!r} is not implemented; llama is")
    meta = {k.removeprefix("llama."): v for k, v in file.metadata.items() if k.startswith("llama.")}
    needed = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
              "attention.layer_norm_rms_epsilon")  # fmt: skip
    problems = [f"llama.{k} is missing" for k in needed if k not in meta]
    problems += [f"llama.{k} = {str(v)[:60]} is unknown to specjax" for k, v in meta.items() if k not in _KNOWN]
    problems += [f"tensor {k} is missing" for k in ("token_embd.weight",) if k not in file.infos]
    if "rope_freqs.weight" in file.infos:
        problems.append("tensor rope_freqs.weight (Llama 3.1 rope scaling) is not implemented for GGUF; use the "
                        "Hugging Face safetensors folder of the model")  # fmt: skip
    if problems:
        raise ValueError(f"{file.path} can't be used:\n  " + "\n  ".join(problems))
    heads = meta["attention.head_count"]
    head_dim = meta.get("attention.key_length", meta["embedding_length"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.get(key, head_dim) != head_dim:
            raise ValueError(f"{file.path}: llama.{key} = {meta[key]} differs from the head size {head_dim}")
    ends = [file.metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot")]
    return LlamaConfig(
        vocab_size=file.infos["token_embd.weight"].shape[0],
        hidden_size=meta["embedding_length"],
        intermediate_size=meta["feed_forward_length"],
        num_hidden_layers=meta["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=meta.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=meta["context_length"],
        rms_norm_eps=_short(meta["attention.layer_norm_rms_epsilon"]),
        rope_theta=_short(meta.get("rope.freq_base", 10000.0)),
        rope_scaling=_read_scaling(file, meta),
        tie_word_embeddings="output.weight" not in file.infos,
        attention_bias="blk.0.attn_q.bias" in file.infos,
        mlp_bias="blk.0.ffn_gate.bias" in file.infos,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
    )


def hf_name(name: str) -> str:
    """Hugging Face's name of a tensor; a name outside the table stays, to be reported as unexpected."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{kind}"
    return name


def tensors(file: GGUF, config: LlamaConfig) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, array) of each tensor, one at a time."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, array in file:
        count = heads.get(name.split(".")[-2] if "." in name else name)
        yield hf_name(name), array if count is None else unpermute(array, count)
        del array


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * D, ...] from llama.cpp's rotary layout (pairs side by side) to halves (pair i is i, i + D/2)."""
    if len(rows) % (2 * heads):
        return rows  # misshapen: the table of tensors reports it
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _read_scaling(file: GGUF, meta: dict) -> RopeScaling | None:
    kind = meta.get("rope.scaling.type", "linear" if "rope.scale_linear" in meta else "none")
    factor = meta.get("rope.scaling.factor", meta.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=factor)
    if kind == "yarn" and meta.get("rope.scaling.attn_factor", 1.0) == 1.0:
        original = meta.get("rope.scaling.original_context_length", meta["context_length"])
        return RopeScaling("yarn", factor=factor, original_max_position_embeddings=original)
    given = {k: v for k, v in meta.items() if k.startswith("rope.scaling.")}
    raise ValueError(f"{file.path}: rope scaling {given} is not implemented; linear and plain yarn are")


def _short(value: float) -> float:
    # Metadata is float32: 1e-5 comes back as 9.99999974e-06. The shortest decimal is what the author wrote.
    return float(str(np.float32(value)))
