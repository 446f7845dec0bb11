"""A tokenizer's folder as fine-tunes leave it: settings that are not the text's, and special tokens in other files."""

import pytest
from small_tokenizers import added, byte_level, saved, sentencepiece_like, write
from transformers import AutoTokenizer

from specjax.text.tokenizer import Tokenizer


def theirs(folder, text):
    return AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)


def test_stored_truncation_and_padding_are_not_obeyed(tmp_path):
    t = byte_level()
    t.backend.enable_truncation(9)
    t.backend.enable_padding(length=16, pad_id=1, pad_token="</s>")
    t.save(tmp_path)
    back = Tokenizer.load(tmp_path)
    long = "x" * 222
    assert len(back.encode(long)) == 223 and len(back.apply_chat_template(long)) > 222
    assert len(back.encode("x")) == 2
    assert len(Tokenizer(t.backend, 0, 1).encode(long)) == 222


def test_tokens_of_the_added_tokens_decoder_stand_at_their_ids_with_their_flags(tmp_path):
    size = len(byte_level())
    tokens = {
        str(size): added("<|im_start|>"),
        str(size + 1): added("<|im_end|>", rstrip=True),
        str(size + 2): added("<think>", special=False),
        "2": added("<t>", lstrip=True),  # stands in tokenizer.json already, with other flags
    }
    saved(tmp_path, added_tokens_decoder=tokens, eos_token="<|im_end|>", add_bos_token=False)
    t = Tokenizer.load(tmp_path)
    text = "<|im_start|>a <t><think>b<|im_end|> \nc"
    ids = t.encode(text)
    assert ids == theirs(tmp_path, text)
    assert ids[0] == size and size + 1 in ids and size + 2 in ids and t.eos_id == size + 1
    assert t.decode(ids) == "a<think>bc"  # flags: a space before <t> and after <|im_end|> belongs to the token
    t.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").encode(text) == ids


def test_tokens_of_the_older_files_stand_at_their_ids(tmp_path):
    size = len(sentencepiece_like())
    saved(tmp_path, sentencepiece_like(), bos_token="<s>", eos_token="</s>")
    write(tmp_path, "added_tokens.json", {"<|im_end|>": size + 1, "<|im_start|>": size, "<tool>": size + 2})
    names = {"eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>"], "pad_token": "<|im_end|>"}
    write(tmp_path, "special_tokens_map.json", names)
    t = Tokenizer.load(tmp_path)
    text = "<|im_start|>ab<tool><|im_end|>"
    assert t.encode(text)[1:] == theirs(tmp_path, text)
    assert [t.backend.token_to_id(s) for s in ("<|im_start|>", "<|im_end|>", "<tool>")] == [size, size + 1, size + 2]
    assert t.decode(t.encode(text)) == "ab<tool>" and t.eos_id == size + 1


def test_a_named_token_of_the_vocabulary_is_special(tmp_path):
    saved(tmp_path, byte_level(extra=["<pad>", "<x>"]), pad_token="<pad>", additional_special_tokens=["<x>", "<new>"])
    t = Tokenizer.load(tmp_path)
    text = "a<pad>b<x><new>"
    assert t.encode(text) == theirs(tmp_path, text)
    assert t.decode(t.encode(text)) == "ab"


@pytest.mark.parametrize(
    "tokens, message",
    [
        ({"270": added("<far>")}, "'<far>' can't have id 270: the next free id is 259"),
        ({"5": added("<mine>")}, "'<mine>' can't have id 5, which is '.*'"),
        ({"259": added("<t>")}, "'<t>' can't have id 259: tokenizer.json gives it id 2"),
        ({"x": added("<y>")}, "added_tokens_decoder"),
        ({"259": "<y>"}, "added_tokens_decoder"),
        ([1], "added_tokens_decoder"),
    ],
)
def test_an_id_that_cannot_be_honoured_is_refused_by_name(tmp_path, tokens, message):
    saved(tmp_path, added_tokens_decoder=tokens)
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(tmp_path)
