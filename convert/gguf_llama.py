"""Llama models in GGUF files: the metadata as a config, and the tensors under their Hugging Face names."""

from collections.abc import Iterator

import numpy as np

from convert.gguf import GGUF
from specjax.models import config_values as values
from specjax.models.config import LlamaConfig, RopeScaling

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
FREQUENCIES = "rope_freqs.weight"  # the divisor of each rotary frequency, for Llama 3.1's scaling
_EMBEDDING = "token_embd.weight"
# Keys that are read, without their prefix "llama.". Any other key could change the model, so it is refused.
_RULES = {
    **dict.fromkeys(
        "context_length embedding_length block_count feed_forward_length vocab_size attention.head_count "
        "attention.head_count_kv attention.key_length attention.value_length rope.dimension_count "
        "rope.scaling.original_context_length".split(),
        values.COUNT,
    ),
    "attention.layer_norm_rms_epsilon": values.POSITIVE,
    "rope.freq_base": values.POSITIVE,
    "rope.scale_linear": values.NOT_NEGATIVE,
    "rope.scaling.factor": values.NOT_NEGATIVE,
    "rope.scaling.type": values.TEXT,
    "rope.scaling.attn_factor": values.POSITIVE,
    "expert_count": values.Rule("0", lambda v: v == 0),
    "expert_used_count": values.Rule("0", lambda v: v == 0),
}
_IGNORED = frozenset(["rope.scaling.finetuned", "tensor_data_layout"])
_NEEDED = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
           "attention.layer_norm_rms_epsilon")  # fmt: skip


def read_config(file: GGUF) -> LlamaConfig:
    """The model's shape, from metadata and tensor names.

    Raises:
      ValueError: the architecture is not Llama, or keys are missing, unknown, or have a value that is not implemented.
        The message names them.
    """
    arch = file.metadata.get("general.architecture")
    if arch != "llama":
        raise ValueError(f"{file.path}: general.architecture = {arch!r} is not implemented; llama is")
    meta = {k.removeprefix("llama."): v for k, v in file.metadata.items() if k.startswith("llama.")}
    _check(file, meta)
    heads = meta["attention.head_count"]
    head_dim = meta.get("attention.key_length", meta["embedding_length"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.get(key, head_dim) != head_dim:
            raise ValueError(f"{file.path}: llama.{key} = {meta[key]} differs from the head size {head_dim}")
    ids = _special_ids(file)
    try:
        return LlamaConfig(
            vocab_size=file.shape(_EMBEDDING)[0],
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
            tie_word_embeddings="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            bos_token_id=ids.pop("bos", None),
            eos_token_ids=tuple(dict.fromkeys(ids.values())),
        )
    except ValueError as problem:
        raise ValueError(f"{file.path} can't be used: {problem}") from None


def _check(file: GGUF, meta: dict) -> None:
    problems = [f"llama.{k} is missing" for k in _NEEDED if k not in meta]
    unknown = [k for k in meta if k not in _RULES and k not in _IGNORED]
    problems += [f"llama.{k} = {str(meta[k])[:60]} is unknown to specjax" for k in unknown]
    problems += [f"llama.{problem}" for problem in values.problems(meta, _RULES)]
    if len(file.tensors[_EMBEDDING].shape if _EMBEDDING in file.tensors else ()) != 2:
        problems.append(f"tensor {_EMBEDDING} of two dimensions is missing")
    if problems:
        raise ValueError(f"{file.path} can't be used:\n  " + "\n  ".join(problems))


def _special_ids(file: GGUF) -> dict[str, int]:
    """The ids of BOS ("bos") and of the tokens that end a document ("eos"), a turn ("eot") or a message ("eom")."""
    ids = {}
    for name in ("bos", "eos", "eot", "eom"):
        key, rule = f"tokenizer.ggml.{name}_token_id", values.token_id(file.shape(_EMBEDDING)[0])
        value = file.metadata.get(key)
        if value is not None:
            if not rule.holds(value):
                raise ValueError(f"{file.path}: {rule.problem(key, value)}")
            ids[name] = value
    return ids


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor. A name outside the table stays as it is, to be reported as unexpected."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{kind}"
    return name


def tensors(file: GGUF, config: LlamaConfig) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, array) of each tensor. One tensor at a time is held."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, array in file:
        if name == FREQUENCIES:
            continue  # the config has them
        count = heads.get(name.split(".")[-2] if "." in name else name)
        yield hf_name(name), array if count is None else unpermute(array, count)
        del array


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * D, ...] from llama.cpp's rotary layout to specjax's.

    In llama.cpp, pair i of a head is rows 2 i and 2 i + 1. In specjax, it is rows i and i + D/2.
    """
    if len(rows) % (2 * heads):
        return rows  # misshapen, which the table of tensors reports later
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def shapes(file: GGUF) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape) of each tensor of :func:`tensors`."""
    return ((hf_name(name), shape) for name, shape in file.shapes() if name != FREQUENCIES)


def _read_scaling(file: GGUF, meta: dict) -> RopeScaling | None:
    """The rope scaling of metadata and tensors; None: there is none."""
    kind = meta.get("rope.scaling.type", "linear" if "rope.scale_linear" in meta else "none")
    factor = meta.get("rope.scaling.factor", meta.get("rope.scale_linear", 1.0))
    given = {f"llama.{k}": v for k, v in meta.items() if k.startswith("rope.scal")}
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        if FREQUENCIES not in file.tensors:
            return None
        return RopeScaling("factors", factors=tuple(map(_short, file.tensor(FREQUENCIES).reshape(-1))))
    if FREQUENCIES in file.tensors:
        raise ValueError(f"rope scaling {given} together with tensor {FREQUENCIES} is not implemented")
    if kind == "linear":
        return RopeScaling("linear", factor=factor)
    if kind == "yarn" and meta.get("rope.scaling.attn_factor", 1.0) == 1.0:
        original = meta.get("rope.scaling.original_context_length", meta["context_length"])
        return RopeScaling("yarn", factor=factor, original_max_position_embeddings=original)
    raise ValueError(f"rope scaling {given} is not implemented; linear and plain yarn are")


def _short(value: float) -> float:
    """A float32 of the metadata as the author wrote it, which is the shortest decimal: 1e-5, not 9.99999974e-06."""
    return float(str(np.float32(value)))
