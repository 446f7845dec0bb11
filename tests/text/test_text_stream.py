"""Streamed text: the text of decoding all tokens at once, for work that grows with the number of tokens alone."""

import numpy as np
import pytest
from small_tokenizers import byte_level, sentencepiece_like

from specjax.text.text_stream import TextStream

LENGTH = 2000
BYTE = {"byte level": byte_level(), "sentencepiece": sentencepiece_like()}


def byte_id(name: str, value: int) -> int:
    """The id of a token that stands for one byte."""
    if name == "sentencepiece":
        return BYTE[name].backend.token_to_id(f"<0x{value:02X}>")
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # GPT-2's spelling of bytes
    hidden = [b for b in range(256) if b not in visible]
    return BYTE[name].backend.token_to_id(chr(value if value in visible else 256 + hidden.index(value)))


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def decode(self, ids, **options):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


def streamed(tokenizer, tokens) -> str:
    stream = TextStream(tokenizer)
    text = "".join([*map(stream.push, tokens), stream.flush()])
    assert text == stream.text
    return text


RUNS = {
    "special tokens": lambda name: [BYTE[name].eos_id] * LENGTH,
    "ids without a token": lambda name: [len(BYTE[name]) + 7] * LENGTH,
    "bytes within a character": lambda name: [byte_id(name, 0x9F)] * LENGTH,
    "first bytes of characters": lambda name: [byte_id(name, 0xF0)] * LENGTH,
    "broken, then good characters": lambda name: [byte_id(name, b) for b in [0x80, *"é".encode() * LENGTH]],
    "good characters": lambda name: [byte_id(name, b) for b in "é".encode() * LENGTH],
    "good characters and special tokens": lambda name: [
        t for b in "é".encode() * LENGTH for t in (byte_id(name, b), BYTE[name].eos_id)
    ],
}


@pytest.mark.parametrize("name", BYTE)
@pytest.mark.parametrize("run", RUNS)
def test_the_work_of_streaming_grows_with_the_number_of_tokens(name, run):
    word = BYTE[name].backend.token_to_id("a")
    tokens = [word, *RUNS[run](name), word]
    counting = Counting(BYTE[name])
    assert streamed(counting, tokens) == BYTE[name].decode(tokens)
    assert counting.decoded <= 25 * len(tokens)


@pytest.mark.parametrize("name", BYTE)
def test_random_tokens_stream_to_the_text_of_decoding_them_at_once(name):
    tokenizer, rng = BYTE[name], np.random.default_rng(0)
    characters = [[byte_id(name, b) for b in c.encode()] for c in "é日🙂\N{REPLACEMENT CHARACTER} a"]
    broken = [byte_id(name, b) for b in (0x80, 0x9F, 0xC3, 0xE2, 0xF0, 0xF4, 0xED, 0xA0, 0xFF)]
    for _ in range(1500):
        tokens: list[int] = []
        for _ in range(rng.integers(1, 9)):
            kind = rng.integers(5)
            if kind == 0:
                tokens += characters[rng.integers(len(characters))]
            elif kind == 1:
                tokens += rng.choice(broken, rng.integers(1, 8)).tolist()
            elif kind == 2:
                tokens += [tokenizer.eos_id, len(tokenizer) + 3][: rng.integers(1, 3)]
            elif kind == 3:
                tokens += tokenizer.backend.encode("ab a", add_special_tokens=False).ids[: rng.integers(1, 4)]
            else:
                tokens.append(int(rng.integers(len(tokenizer))))
        assert streamed(tokenizer, tokens) == tokenizer.decode(tokens), tokens


@pytest.mark.parametrize("name", BYTE)
def test_a_stop_string_is_found_at_its_last_token_after_a_run_that_prints_nothing(name):
    tokenizer = BYTE[name]
    smile = [byte_id(name, b) for b in "🙂".encode()]
    word = [tokenizer.backend.token_to_id(c) for c in "ab"]
    for run in (RUNS["special tokens"](name)[:50], RUNS["bytes within a character"](name)[:50]):
        stream = TextStream(tokenizer, ("🙂", "ab"))
        assert not any((stream.push(t), stream.stopped)[1] for t in [*run, word[0]])
        stream.push(word[1])
        assert stream.stopped
    for before in ([], word[:1], [byte_id(name, b) for b in "é".encode()]):
        stream = TextStream(tokenizer, ("🙂", "ab"))
        stopped = [(stream.push(t), stream.stopped)[1] for t in [*before, *smile]]
        assert stopped == [False] * (len(before) + 3) + [True]
