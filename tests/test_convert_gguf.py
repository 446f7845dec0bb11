"""The GGUF reader, on files written here from the format's description."""

import struct

import ml_dtypes
import numpy as np
import pytest
from test_convert_llama import random_tensors

from convert import gguf_llama
from convert import llama as convert_llama
from convert.gguf import GGUF, dequantise
from convert.source import open_source
from specjax.config import LlamaConfig, RopeScaling

CODES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "BF16": 30}
CONFIG = LlamaConfig(64, 64, 96, 2, 4, 2, 16, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=True)


def text(s):
    return struct.pack("<Q", len(s.encode())) + s.encode()


def value(v):
    if isinstance(v, bool):
        return struct.pack("<I?", 7, v)
    if isinstance(v, int):
        return struct.pack("<II", 4, v)
    if isinstance(v, float):
        return struct.pack("<If", 6, v)
    if isinstance(v, str):
        return struct.pack("<I", 8) + text(v)
    inner = 8 if isinstance(v[0], str) else 5
    items = (text(x) if inner == 8 else struct.pack("<i", x) for x in v)
    return struct.pack("<IIQ", 9, inner, len(v)) + b"".join(items)


def write(path, metadata, tensors, version=3):
    """tensors: name -> (kind, shape, raw bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(k) + value(v) for k, v in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", CODES[kind], len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)


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


def llama_tensors(config, tensors):
    """Under GGUF's names and with its row order in q and k; matrices as F16, the rest as F32."""
    names = {v: k for k, v in {**gguf_llama._TOP, **gguf_llama._LAYER}.items()}
    result = {}
    for name, array in tensors.items():
        stem, kind = name.rsplit(".", 1)
        parts = stem.split(".", 3)
        layer = f"blk.{parts[2]}." if stem.startswith("model.layers") else ""
        new = f"{layer}{names[parts[3] if layer else stem]}.{kind}"
        for part, heads in (("attn_q.", config.num_attention_heads), ("attn_k.", config.num_key_value_heads)):
            if part in new:  # halves to pairs, row by row
                d = config.head_dim
                order = [h * d + j + half * d // 2 for h in range(heads) for j in range(d // 2) for half in (0, 1)]
                array = array[order]
        dtype, code = (np.float16, "F16") if array.ndim == 2 else (np.float32, "F32")
        result[new] = (code, array.shape, array.astype(dtype).tobytes())
    return result


def test_blocks_are_dequantised_as_described(tmp_path):
    rng = np.random.default_rng(0)
    d, m = rng.normal(size=(2, 6)).astype(np.float16)
    q8 = rng.integers(-128, 128, (6, 32)).astype(np.int8)
    q4 = rng.integers(0, 16, (6, 32))
    nibbles = (q4[:, :16] | q4[:, 16:] << 4).astype(np.uint8)
    columns = {
        "Q8_0": ((d, q8), d[:, None].astype(np.float32) * q8),
        "Q4_0": ((d, nibbles), d[:, None].astype(np.float32) * (q4 - 8)),
        "Q4_1": ((d, m, nibbles), d[:, None].astype(np.float32) * q4 + m[:, None].astype(np.float32)),
    }
    tensors = {
        kind: (kind, (3, 64), b"".join(b"".join(c[i].tobytes() for c in cols) for i in range(6)))
        for kind, (cols, _) in columns.items()
    }
    plain = rng.normal(size=(2, 3)).astype(ml_dtypes.bfloat16)
    tensors |= {"BF16": ("BF16", (2, 3), plain.tobytes())}
    metadata = {"a": 1, "b": [1, -2], "c": ["x", "ü"], "d": 0.5, "e": True}
    write(tmp_path / "x.gguf", metadata, tensors, version=2)
    file = GGUF(tmp_path / "x.gguf")
    assert {**file.metadata, "b": file.metadata["b"].tolist()} == metadata
    read = dict(file)
    for kind, (_, expected) in columns.items():
        assert read[kind].dtype == np.float32
        np.testing.assert_array_equal(read[kind], expected.astype(np.float32).reshape(3, 64))
    np.testing.assert_array_equal(read["BF16"], plain)
    assert dequantise("Q8_0", np.zeros(0, [("d", "<f2"), ("q", "i1", 32)])).shape == (0, 32)


def test_llama_comes_back_with_its_rows_in_order(tmp_path):
    tensors = random_tensors(CONFIG, dtype=np.float16)
    metadata = llama_metadata(CONFIG, **{"tokenizer.ggml.eos_token_id": 3})
    write(tmp_path / "m.gguf", metadata, llama_tensors(CONFIG, tensors))
    source = open_source(tmp_path / "m.gguf")
    assert source.config == LlamaConfig.from_dict({**CONFIG.to_dict(), "eos_token_ids": (3,)})
    back = convert_llama.to_hf(source.config, source.fill())
    assert all((back[name] == array.astype(np.float32)).all() for name, array in tensors.items())
    q = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert not (gguf_llama.unpermute(q, 4) == q).all()


def test_rope_scaling_and_heads(tmp_path):
    untied = LlamaConfig.from_dict({**CONFIG.to_dict(), "tie_word_embeddings": False})
    parts = llama_tensors(untied, random_tensors(untied))
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write(tmp_path / "m.gguf", llama_metadata(CONFIG, **linear), parts)
    config = open_source(tmp_path / "m.gguf").config
    assert config.rope_scaling == RopeScaling("linear", factor=4.0) and not config.tie_word_embeddings
    for more, words in [
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"general.architecture": "qwen2"}, "qwen2"),
        ({"llama.rope.dimension_count": 8}, "dimension_count"),
    ]:
        write(tmp_path / "m.gguf", llama_metadata(CONFIG) | more, parts)
        with pytest.raises(ValueError, match=words):
            open_source(tmp_path / "m.gguf")
    parts["rope_freqs.weight"] = ("F32", (8,), np.ones(8, np.float32).tobytes())
    write(tmp_path / "m.gguf", llama_metadata(CONFIG), parts)
    with pytest.raises(ValueError, match="rope_freqs"):
        open_source(tmp_path / "m.gguf")


def test_damaged_and_unknown_files_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, llama_metadata(CONFIG), llama_tensors(CONFIG, random_tensors(CONFIG)))
    raw = path.read_bytes()
    for cut in (0, 3, 23, 40, 200, 1000, len(raw) // 2, len(raw) - 64):
        path.write_bytes(raw[:cut])
        with pytest.raises(ValueError, match=str(cut)):
            GGUF(path)
    for broken, words in [(b"GGUX" + raw[4:], "GGUX"), (raw[:4] + b"\x01" + raw[5:], "version 1"),
                          (raw[:8] + b"\xff" * 8 + raw[16:], "cut|overlap|type|twice")]:  # fmt: skip
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=words):
            GGUF(path)
    write(path, {}, {"w": ("Q4_K", (1, 256), b"\0" * 144)})
    with pytest.raises(ValueError, match="tensor w has type Q4_K"):
        GGUF(path)
    write(path, {}, {"w": ("Q8_0", (2, 16), b"\0" * 34)})
    with pytest.raises(ValueError, match="multiple of 32"):
        GGUF(path)
