"""GGUF files: values, rows and rope scaling against transformers, and unusable files refused by file and key."""

import dataclasses
import struct

import jax
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from gguf_files import CONFIG, llama_metadata, llama_tensors, write_gguf
from hf_folders import TINY, random_tensors

from convert import gguf as convert_gguf
from convert import gguf_llama
from convert import llama_weights as convert_llama
from convert.gguf import GGUF
from convert.source import open_source
from specjax.models.config import LlamaConfig, RopeScaling, from_hf, to_hf
from specjax.models.lm import LM

WIDE = LlamaConfig(256, 256, 256, 1, 4, 2, 64, max_position_embeddings=128, rms_norm_eps=1e-5, rope_theta=5e5)


def logits(config, params, tokens):
    lm = LM(config, params)
    return jax.jit(lambda lm, cache: lm(tokens[None], cache).logits[0])(lm, lm.alloc_cache(1, len(tokens)))


TOKENS = np.arange(24) * 7 % 64


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K",
                                  "Q5_K", "Q6_K"])  # fmt: skip
def test_logits_are_those_of_transformers(tmp_path, kind):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    plain = random_tensors(WIDE)
    tensors = llama_tensors(WIDE, plain, kind)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**without_type(to_hf(WIDE)))).eval()
    theirs.load_state_dict(
        {name: torch.from_numpy(hf_rows(*tensor)) for name, tensor in zip(plain, tensors.items(), strict=True)}
    )
    with torch.no_grad():
        expected = theirs(torch.from_numpy(TOKENS)[None]).logits[0].numpy()
    write_gguf(tmp_path / "m.gguf", llama_metadata(WIDE), tensors)
    source = open_source(tmp_path / "m.gguf")
    got = logits(source.config, source.fill(), TOKENS)
    np.testing.assert_allclose(got, expected, atol=2e-4 * max(1, np.abs(expected).max()))


def hf_rows(name, tensor):
    """A tensor of :func:`llama_tensors` as float32, its rows in Hugging Face's order."""
    kind, shape, raw = tensor
    array = dequantize(np.frombuffer(raw, np.uint8).reshape(*shape[:-1], -1), Kind[kind]).reshape(shape)
    heads = {"attn_q": WIDE.num_attention_heads, "attn_k": WIDE.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return array.copy()
    halves = [array.reshape(heads, -1, 2, shape[-1])[:, :, half] for half in (0, 1)]  # pairs side by side
    return np.concatenate(halves, axis=1).reshape(shape)


def without_type(hf):
    return {name: value for name, value in hf.items() if name != "model_type"}


def test_frequencies_stored_as_a_tensor_give_llama_3s_logits(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    config = from_hf({**TINY, "head_dim": 16, "rope_theta": 100.0, "rope_scaling": scaling})
    tensors = random_tensors(config)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**without_type(to_hf(config)))).eval()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in tensors.items()})
    tokens = np.arange(40) * 5 % 48
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)[None]).logits[0].numpy()

    plain = 1.0 / 100.0 ** (np.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.min() == 1 and factors.max() > 7.99 and ((factors > 1.01) & (factors < 7.99)).any()
    parts = llama_tensors(config, tensors, "F32") | {"rope_freqs.weight": ("F32", (8,), factors.tobytes())}
    sizes = {"llama.attention.key_length": 16, "llama.attention.value_length": 16}
    write_gguf(tmp_path / "m.gguf", llama_metadata(config, **sizes), parts)
    source = open_source(tmp_path / "m.gguf")
    assert source.config.rope_scaling.kind == "factors" and source.total == len(tensors)
    assert LlamaConfig.from_dict(source.config.to_dict()) == source.config
    params = source.fill()
    np.testing.assert_allclose(logits(source.config, params, tokens), expected, atol=2e-5)
    assert np.abs(logits(dataclasses.replace(config, rope_scaling=None), params, tokens) - expected).max() > 1e-3

    again = transformers.LlamaConfig(**without_type(to_hf(source.config)))
    exported = transformers.LlamaForCausalLM(again).eval()
    exported.load_state_dict(model.state_dict())
    with torch.no_grad():
        np.testing.assert_allclose(exported(torch.from_numpy(tokens)[None]).logits[0].numpy(), expected, atol=2e-5)


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
    write_gguf(tmp_path / "x.gguf", metadata, tensors)
    raw = bytearray((tmp_path / "x.gguf").read_bytes())
    raw[4] = 2  # the older version has the same layout
    (tmp_path / "x.gguf").write_bytes(raw)
    file = GGUF(tmp_path / "x.gguf")
    assert {key: file.metadata[key] for key in metadata} == metadata
    read = dict(file)
    for kind, (_, expected) in columns.items():
        assert read[kind].dtype == np.float32
        np.testing.assert_array_equal(read[kind], expected.astype(np.float32).reshape(3, 64))
    np.testing.assert_array_equal(read["BF16"], plain)


def test_a_tensor_is_dequantised_by_pieces(tmp_path, monkeypatch):
    """So that only one whole tensor is held; the values are those of the package's own call."""
    array = np.random.default_rng(0).normal(size=(7, 4, 64))
    packed = quantize(array.astype(np.float32), Kind.Q5_1)
    write_gguf(tmp_path / "x.gguf", {}, {"w": ("Q5_1", (7, 4, 64), packed.tobytes())})
    monkeypatch.setattr(convert_gguf, "_VALUES_AT_A_TIME", 130)
    sizes = []
    spy = lambda rows, kind: sizes.append(len(rows)) or dequantize(rows, kind)  # noqa: E731
    monkeypatch.setattr(convert_gguf, "dequantize", spy)
    file = GGUF(tmp_path / "x.gguf")
    sizes.clear()
    np.testing.assert_array_equal(file.tensor("w"), dequantize(packed, Kind.Q5_1))
    assert sizes == [2] * 14


def test_llama_comes_back_with_its_rows_in_order(tmp_path):
    tensors = random_tensors(CONFIG, dtype=np.float16)
    metadata = llama_metadata(CONFIG, **{"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eom_token_id": 5})
    write_gguf(tmp_path / "m.gguf", metadata, llama_tensors(CONFIG, tensors))
    source = open_source(tmp_path / "m.gguf")
    assert source.config == LlamaConfig.from_dict({**CONFIG.to_dict(), "eos_token_ids": (3, 5)})
    back = convert_llama.to_hf(source.config, source.fill())
    assert all((back[name] == array.astype(np.float32)).all() for name, array in tensors.items())
    q = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert not (gguf_llama.unpermute(q, 4) == q).all()


def test_what_a_file_may_leave_out(tmp_path):
    """The sizes of the first Llama: as many kv heads as heads, and a rope_theta of 10000."""
    first = dataclasses.replace(CONFIG, num_key_value_heads=CONFIG.num_attention_heads, rope_theta=1e4)
    metadata = llama_metadata(first)
    for key in ("llama.rope.freq_base", "llama.attention.head_count_kv", "llama.rope.dimension_count"):
        del metadata[key]
    write_gguf(tmp_path / "m.gguf", metadata, llama_tensors(first, random_tensors(first)))
    config = open_source(tmp_path / "m.gguf").config
    assert dataclasses.replace(config, eos_token_ids=first.eos_token_ids) == first


def test_rope_scaling_and_heads(tmp_path):
    untied = LlamaConfig.from_dict({**CONFIG.to_dict(), "tie_word_embeddings": False})
    parts = llama_tensors(untied, random_tensors(untied))
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "m.gguf", llama_metadata(CONFIG, **linear), parts)
    config = open_source(tmp_path / "m.gguf").config
    assert config.rope_scaling == RopeScaling("linear", factor=4.0) and not config.tie_word_embeddings
    parts["rope_freqs.weight"] = ("F32", (8,), np.ones(8, np.float32).tobytes())
    write_gguf(tmp_path / "m.gguf", llama_metadata(CONFIG, **linear), parts)
    with pytest.raises(ValueError, match="rope scaling .*linear.* together with tensor rope_freqs.weight"):
        open_source(tmp_path / "m.gguf")
    parts["rope_freqs.weight"] = ("F32", (7,), np.ones(7, np.float32).tobytes())
    write_gguf(tmp_path / "m.gguf", llama_metadata(CONFIG), parts)
    with pytest.raises(ValueError, match="m.gguf.*has 7 factors, expected head_dim / 2 = 8"):
        open_source(tmp_path / "m.gguf")


@pytest.mark.parametrize("more, words", [
    ({"llama.rope.scaling.type": "longrope"}, "longrope"),
    ({"llama.expert_count": 8}, "llama.expert_count must be 0, got 8"),
    ({"llama.unheard_of": 8}, "llama.unheard_of = 8 is unknown"),
    ({"general.architecture": "qwen2"}, "qwen2"),
    ({"llama.rope.dimension_count": 8}, "dimension_count"),
    ({"llama.block_count": None}, "llama.block_count is missing"),
    ({"llama.block_count": 0}, "llama.block_count must be a positive integer, got 0"),
    ({"llama.attention.head_count": "4"}, "llama.attention.head_count must be a positive integer, got '4'"),
    ({"llama.attention.head_count_kv": [2, 2]}, r"head_count_kv must be a positive integer, got \[2, 2\]"),
    ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "layer_norm_rms_epsilon must be a positive number, got -1.0"),
    ({"llama.rope.freq_base": 0.0}, "llama.rope.freq_base must be a positive number, got 0.0"),
    ({"llama.rope.scaling.type": 2}, "llama.rope.scaling.type must be text, got 2"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.0}, "factor must be a positive number, got 0"),
    ({"llama.attention.head_count_kv": 3}, "must be a multiple of num_key_value_heads"),
    ({"tokenizer.ggml.eos_token_id": 64}, "tokenizer.ggml.eos_token_id must be an id from 0 to 63, got 64"),
    ({"tokenizer.ggml.bos_token_id": "x"}, "tokenizer.ggml.bos_token_id must be an id from 0 to 63, got 'x'"),
    ({"split.count": 3}, "one of 3 pieces"),
], ids=str)  # fmt: skip
def test_every_key_is_judged_by_name(tmp_path, more, words):
    metadata = {k: v for k, v in (llama_metadata(CONFIG) | more).items() if v is not None}
    write_gguf(tmp_path / "m.gguf", metadata, llama_tensors(CONFIG, random_tensors(CONFIG)))
    with pytest.raises(ValueError, match=f"(?s)m.gguf.*{words}"):
        open_source(tmp_path / "m.gguf")


def test_damaged_and_unknown_files_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, llama_metadata(CONFIG, a=[1, 2]), llama_tensors(CONFIG, random_tensors(CONFIG)))
    raw = path.read_bytes()
    for cut in (0, 3, 23, 40, 200, 1000, len(raw) // 2, len(raw) - 64):
        path.write_bytes(raw[:cut])
        with pytest.raises(ValueError, match=f"m.gguf .{cut} bytes. can't be read"):
            GGUF(path)
    array = raw.index(struct.pack("<Q", 1) + b"a" + struct.pack("<II", 9, 5)) + 17
    for broken in (b"GGUX" + raw[4:], raw[:4] + b"\x01" + raw[5:], raw[:4] + b"\0\0\0\x03" + raw[8:],
                   raw[:8] + b"\xff" * 8 + raw[16:], raw[:array] + b"\xff" * 6 + raw[array + 6 :]):  # fmt: skip
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="m.gguf .*can't be read as GGUF version 2 or 3"):
            GGUF(path)
    path.write_bytes(raw.replace(b"general.architecture", b"general.architectur\xff"))
    with pytest.raises(ValueError, match="m.gguf .*can't be read"):
        GGUF(path)
    path.write_bytes(raw.replace(struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"llam\xff"))
    with pytest.raises(ValueError, match="m.gguf: metadata key general.architecture holds text that is not UTF-8"):
        GGUF(path)


def test_tensors_that_cannot_be_read_are_refused_before_any_is(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, {}, {"v": ("F32", (4,), b"\0" * 16), "w": ("Q8_1", (1, 32), b"\0" * 40)})
    with pytest.raises(ValueError, match="m.gguf: tensor w has type Q8_1, which the gguf package can't dequantise"):
        GGUF(path)
    write_gguf(path, {}, {"v": ("F32", (16,), b"\0" * 64), "w": ("Q8_0", (2, 32), b"\0" * 68)})
    raw = path.read_bytes()
    entry = raw.index(b"w" + struct.pack("<I", 2)) + 5
    path.write_bytes(raw[:entry] + struct.pack("<Q", 16) + raw[entry + 8 :])
    with pytest.raises(ValueError, match=r"m.gguf .*row size \(16\) is not a multiple of Q8_0 block size"):
        GGUF(path)
    offset = entry + 8 + 8 + 4
    path.write_bytes(raw[:offset] + struct.pack("<Q", 0) + raw[offset + 8 :])
    with pytest.raises(ValueError, match="m.gguf: tensor . overlaps "):
        GGUF(path)
