"""Tokenizers of GGUF files: the ids of transformers' tokenizers, and one error by file and key for unusable ones."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from gguf_files import CONFIG, llama_metadata, llama_tensors, write_gguf
from hf_folders import random_tensors
from tokenizers import pre_tokenizers

from convert import gguf_tokenizer
from convert.source import open_source

TEXTS = ["ab12é<e>\n", " ab  a\n\nb", "abab 1234567 ABAB's", "  ", "", "a\u3000b 🙂", "x<s>ab", "don't 12ab\r\n\r\n ab"]


def read(metadata):
    return gguf_tokenizer.read(SimpleNamespace(path=Path("m.gguf"), metadata=metadata))


def keys(**values):
    return {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None}


def byte_level(**more):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<e>", "<s>", *letters, "ab", "12", "abab", "Ġab"]
    meta = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": [3, 3] + [1] * (len(tokens) - 2),
            "merges": ["a b", "1 2", "Ġ ab"], "bos_token_id": 1, "eos_token_id": 0}  # fmt: skip
    return keys(**(meta | more))


def sentence_piece(**more):
    """As Llama 2's: bytes, letters, then words in the order of their merges."""
    letters = ["▁", "a", "b", "c", "'", "s", "<", ">", "1", "2"]
    words = ["ab", "▁a", "▁ab", "abc", "bc", "▁▁", "aa", "s>", "<s", "12"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words, *letters, "<|im_start|>"]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [-100.0 - i for i in range(len(letters))] + [0.0]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters)) + [4]
    meta = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types, "bos_token_id": 1,
            "eos_token_id": 2, "unknown_token_id": 0}  # fmt: skip
    return keys(**(meta | more))


def test_smollm_splits_digits_and_gpt_2_does_not():
    t = read(byte_level())
    text = "ab 12é<e>\n"
    assert t.decode(t.encode(text), skip_special_tokens=False) == text
    assert t.decode(t.encode(text)) == "ab 12é\n"
    assert [t.token_str(i) for i in t.encode("ab12<s>")] == ["ab", "1", "2", "<s>"]
    assert not t.add_bos and (t.bos_id, t.eos_id) == (1, 0)
    joined = read(byte_level(pre="gpt-2", add_bos_token=True))
    assert [joined.token_str(i) for i in joined.encode("ab12")] == ["<s>", "ab", "12"]


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3"])
def test_llama_3_has_the_ids_of_its_tokenizer_json(pre):
    """Built here as that file describes; 'abab' has no merge, and is one token because words are looked up first."""
    meta = byte_level(pre=pre)
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    vocab = {t: i for i, t in enumerate(meta["tokenizer.ggml.tokens"])}
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, ignore_merges=True))
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(tokenizers.Regex(words), "isolated", False)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, True, False)])
    theirs.add_special_tokens(["<e>", "<s>"])
    ours = read(meta)
    assert ours.add_bos  # where the file doesn't say
    for text in TEXTS:
        assert ours.encode(text) == [1, *theirs.encode(text, add_special_tokens=False).ids]
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == "<s>" + text
    assert [ours.token_str(i) for i in ours.encode("abab1234")[1:]] == ["abab", "12", "3", "4"]
    assert not read(byte_level(pre=pre, add_bos_token=False)).add_bos


def test_sentence_piece_has_the_ids_of_llama_2s_tokenizer():
    transformers = pytest.importorskip("transformers")
    from transformers.tokenization_utils_base import generate_merges

    meta = sentence_piece()
    tokens, scores = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.scores"]
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    theirs = transformers.LlamaTokenizer(vocab=vocab, merges=merges)
    ours = read(meta)
    assert ours.add_bos and (ours.bos_id, ours.eos_id) == (1, 2)
    for text in ["ab", "abc ab", "aabc's 12 a  b", "a é日本 🙂", "\nab", "zab", "cab ab", "12", "a<b>"]:
        assert ours.encode(text) == [1, *theirs.encode(text, add_special_tokens=False)], text
        assert ours.decode(ours.encode(text)) == text
    assert [ours.token_str(i) for i in ours.encode("abc<|im_start|>")][1:] == ["▁ab", "c", "<|im_start|>"]
    plain = read(sentence_piece(add_space_prefix=False, add_bos_token=False))
    assert [plain.token_str(i) for i in plain.encode(" abc")] == ["▁ab", "c"]
    assert plain.decode(plain.encode(" ab")) == " ab" and plain.token_str(plain.encode("ab")[0]) == "ab"


def test_control_tokens_are_never_made_of_pieces():
    """'<s' and '>' are tokens, and so are '<' and 's>'; joined they would be the control token."""
    t = read(sentence_piece(token_type=None) | keys(token_type=[2, 1, 3] + [6] * 256 + [1] * 20 + [4]))
    assert 1 in t.encode("<s>")[1:]  # as a normal token it is made of them
    control = read(sentence_piece()).backend.model
    assert 1 not in [token.id for token in control.tokenize("<s>")]


@pytest.mark.parametrize("meta, words", [
    (byte_level(merges=None), "tokenizer.ggml.merges is missing"),
    (byte_level(merges=[]), "tokenizer.ggml.merges is empty"),
    (byte_level(merges="a b"), "tokenizer.ggml.merges must be a list of texts of two tokens each"),
    (byte_level(merges=["ab"]), "tokenizer.ggml.merges must be a list of texts of two tokens each"),
    (byte_level(merges=["a b", "no where"]), "tokenizer.ggml.merges can't be used with the tokens: .*no"),
    (byte_level(merges=["b b"]), "tokenizer.ggml.merges can't be used with the tokens: .*bb"),
    (byte_level(tokens=None), "tokenizer.ggml.tokens is missing"),
    (byte_level(tokens=[]), "tokenizer.ggml.tokens must be a list of texts"),
    (byte_level(tokens=[1, 2]), "tokenizer.ggml.tokens must be a list of texts"),
    (byte_level(tokens=["a", "b", "a"], token_type=[1, 1, 1]), "tokenizer.ggml.tokens holds 'a' twice"),
    (byte_level(token_type=None), "tokenizer.ggml.token_type is missing"),
    (byte_level(token_type=[1, 1]), "tokenizer.ggml.token_type has 2 entries, expected one for each of 262 tokens"),
    (byte_level(token_type=["x"]), "tokenizer.ggml.token_type must be a list of integers"),
    (byte_level(pre="qwen2"), "tokenizer.ggml.pre = 'qwen2' is not implemented .*llama-bpe"),
    (byte_level(pre=3), "tokenizer.ggml.pre must be text, got 3"),
    (byte_level(model="bert"), "tokenizer.ggml.model = 'bert' is not implemented .gpt2 and llama are"),
    (byte_level(model=["gpt2"]), "tokenizer.ggml.model must be text"),
    (byte_level(bos_token_id=262), "tokenizer.ggml.bos_token_id must be an id from 0 to 261, got 262"),
    (byte_level(eos_token_id="<e>"), "tokenizer.ggml.eos_token_id must be an id from 0 to 261, got '<e>'"),
    (byte_level(add_bos_token="yes"), "tokenizer.ggml.add_bos_token must be true or false, got 'yes'"),
    (byte_level() | {"tokenizer.chat_template": 3}, "tokenizer.chat_template must be text, got 3"),
    (sentence_piece(scores=None), "tokenizer.ggml.scores is missing"),
    (sentence_piece(scores=[0.0]), "tokenizer.ggml.scores has 1 entries"),
    (sentence_piece(unknown_token_id=-1), "tokenizer.ggml.unknown_token_id must be an id"),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_unusable_keys_are_refused_by_file_and_key(meta, words):
    with pytest.raises(ValueError, match=f"^m.gguf: {words}"):
        read(meta)


def test_a_file_without_a_tokenizer_gives_none():
    assert read(llama_metadata(CONFIG)) is None


def test_a_tokenizer_of_more_ids_than_the_model_has_rows_is_refused(tmp_path):
    metadata = llama_metadata(CONFIG) | byte_level()
    write_gguf(tmp_path / "m.gguf", metadata, llama_tensors(CONFIG, random_tensors(CONFIG)))
    with pytest.raises(ValueError, match="m.gguf: tokenizer.ggml.tokens has 262 ids, but the embedding has 64 rows"):
        open_source(tmp_path / "m.gguf")
