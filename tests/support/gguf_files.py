"""GGUF files of tiny models, written with the gguf package."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.quants import quantize

from convert import gguf_llama
from specjax.models.config import LlamaConfig

CONFIG = LlamaConfig(64, 64, 96, 2, 4, 2, 16, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=True)


def write_gguf(path, metadata, tensors):
    """tensors: name -> (kind, shape, raw bytes)."""
    writer = GGUFWriter(path, "llama")
    writer.kv_data[0].clear()
    for key, value in metadata.items():
        numbers = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        numbers.get(type(value), writer.add_array)(key, value)
    for name, (kind, shape, raw) in tensors.items():
        row = gguf.quants.quant_shape_to_byte_shape(shape, Kind[kind]) if shape else (len(raw),)
        writer.add_tensor(name, np.frombuffer(raw, np.uint8).reshape(row), raw_shape=row, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_metadata(config, **more):
    return {
        "general.architecture": "llama", "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size, "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size, "llama.rope.dimension_count": config.head_dim,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps, "llama.rope.freq_base": config.rope_theta,
        **more,
    }  # fmt: skip


def blocks(kind, array, rng):
    """Bytes of a matrix in a type: quantised where the package can, else random blocks with small scales."""
    try:
        return quantize(array.astype(np.float32), Kind[kind]).tobytes()
    except NotImplementedError:
        pass
    values, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    raw = rng.integers(0, 256, (array.size // values, size), np.uint8)
    scale = (0.02 * rng.random(len(raw)) / 2 ** int(kind[1])).astype(np.float16).view(np.uint8).reshape(-1, 2)
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]:
        raw[:, at : at + 2] = scale
    return raw.tobytes()


def llama_tensors(config, tensors, kind="F16"):
    """Under GGUF's names and with its row order in q and k; matrices in ``kind``, the rest as F32."""
    names, rng = {v: k for k, v in {**gguf_llama._TOP, **gguf_llama._LAYER}.items()}, np.random.default_rng(1)
    result = {}
    for name, array in tensors.items():
        stem, ending = name.rsplit(".", 1)
        parts = stem.split(".", 3)
        layer = f"blk.{parts[2]}." if stem.startswith("model.layers") else ""
        new = f"{layer}{names[parts[3] if layer else stem]}.{ending}"
        for part, heads in (("attn_q.", config.num_attention_heads), ("attn_k.", config.num_key_value_heads)):
            if part in new:  # halves to pairs, row by row
                d = config.head_dim
                order = [h * d + j + half * d // 2 for h in range(heads) for j in range(d // 2) for half in (0, 1)]
                array = array[order]
        own = kind if array.ndim == 2 else "F32"
        result[new] = (own, array.shape, blocks(own, array, rng))
    return result
