"""Tokenizers: the same ids as the file says, one BOS, and two tokenizers told apart."""

import json
from types import SimpleNamespace

import pytest
from small_tokenizers import TEMPLATE, byte_level, sentencepiece_like
from tokenizers import pre_tokenizers

from specjax.text.text_stream import TextStream
from specjax.text.tokenizer import Tokenizer, check_same_tokenizer


def test_different_tokenizers_are_told_apart():
    a = byte_level()
    check_same_tokenizer(a, byte_level())
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    swapped = [*letters[:4], letters[5], letters[4], *letters[6:]]
    with pytest.raises(ValueError, match=f"first at id 7: '{letters[4]}' and '{letters[5]}'"):
        check_same_tokenizer(a, byte_level(order=swapped))
    with pytest.raises(ValueError, match="first at id 0: '<s>' and '<unk>'"):
        check_same_tokenizer(a, sentencepiece_like())


def test_two_tokenizers_are_compared_once(monkeypatch):
    a, b = byte_level(), byte_level()
    check_same_tokenizer(a, b)
    only_the_size = SimpleNamespace(get_vocab_size=b.backend.get_vocab_size)
    monkeypatch.setattr(b, "backend", only_the_size)
    check_same_tokenizer(a, b)


@pytest.mark.parametrize("template", [TEMPLATE, "{{ bos_token }}" + TEMPLATE])
def test_a_prompt_has_one_bos_at_most(template):
    t = byte_level(template=template)
    assert t.encode("hi").count(0) == t.encode("<s>hi").count(0) == 1
    messages = [{"role": "user", "content": "hi"}]
    ids = t.apply_chat_template(messages)
    assert ids.count(0) == (ids[0] == 0) == ("bos_token" in template) and ids == t.apply_chat_template("hi")
    assert t.decode(ids) == "[user]hi[a]"
    assert t.decode(t.apply_chat_template(messages, add_generation_prompt=False)) == "[user]hi"
    assert byte_level(add_bos=False, template=template).encode("hi").count(0) == 0


def test_the_post_processor_writes_the_bos():
    t = sentencepiece_like()
    assert t.add_bos and t.encode("ab") == [1, t.backend.token_to_id("▁ab")]


@pytest.mark.parametrize("tokenizer", [sentencepiece_like(), byte_level()], ids=["sentencepiece", "bytes"])
@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 6])
def test_stream_equals_full_decode(tokenizer, block):
    for text in (" ab a  b\nab", "\nab", "  ab", "ab é日本 🙂 ab\n\n a", ""):
        ids = tokenizer.backend.encode(text, add_special_tokens=False).ids + [tokenizer.eos_id]
        stream, pieces = TextStream(tokenizer), []
        for i in range(0, len(ids), block):
            pieces += [stream.push(token) for token in ids[i : i + block]]
        pieces.append(stream.flush())
        assert "".join(pieces) == tokenizer.decode(ids)
        assert tokenizer.decode(ids) == text


def test_folder_round_trip(tmp_path):
    from transformers import AutoTokenizer

    for name, t in (("a", byte_level()), ("b", byte_level(add_bos=False, template=None)), ("c", sentencepiece_like())):
        t.save(tmp_path / name)
        back = Tokenizer.load(tmp_path / name)
        check_same_tokenizer(t, back)
        assert (back.add_bos, back.chat_template) == (t.add_bos, t.chat_template)
        assert back.encode("ab ü 12") == t.encode("ab ü 12")
        theirs = AutoTokenizer.from_pretrained(tmp_path / name)
        assert theirs.encode("ab ü 12", add_special_tokens=False) == back.backend.encode(
            "ab ü 12", add_special_tokens=False
        ).ids


def test_folders_of_others(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        Tokenizer.load(tmp_path)
    byte_level().save(tmp_path)
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>",
              "chat_template": [{"name": "tool", "template": "x"}, {"name": "default", "template": "y"}]}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    t = Tokenizer.load(tmp_path)
    assert (t.bos_id, t.eos_id, t.add_bos, t.chat_template) == (0, 1, False, "y")
    (tmp_path / "chat_template.jinja").write_text("z")
    assert Tokenizer.load(tmp_path).chat_template == "z"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<other>"}))
    with pytest.raises(ValueError, match="<other>"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json can't be read"):
        Tokenizer.load(tmp_path)


def test_chat_template_errors():
    with pytest.raises(ValueError, match="no chat template"):
        byte_level(template=None).apply_chat_template("hi")
    with pytest.raises(ValueError, match="only users"):
        byte_level(template="{{ raise_exception('only users') }}").apply_chat_template("hi")


def test_ids_beyond_the_vocabulary_are_padding():
    t = byte_level()
    assert t.decode([*t.encode("ab"), len(t) + 5]) == "ab" and t.token_str(len(t) + 5) == f"<{len(t) + 5}>"
