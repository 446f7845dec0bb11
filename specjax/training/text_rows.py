"""Rows for training from scratch, and the tokenizer, made of plain text.

Text is cut into passages of whole lines. One passage in twenty is held out.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from specjax.text.tokenizer import Tokenizer
from specjax.training.texts import Texts

PAD, END = "<pad>", "<|endoftext|>"  # the ids 0 and 1; <pad> is also the first token of a T5's decoder
_HELD_OUT = 20  # one passage in so many


class Passages(NamedTuple):
    """Plain text in passages."""

    # The passages to train on.
    training: list[str]
    # The passages that nothing is trained on, for measurements and prompts.
    held_out: list[str]


def passages(text: str, least: int = 1000) -> Passages:
    """Cuts a text into passages of whole lines, each of at least ``least`` characters. Empty lines are left out.

    Raises:
      ValueError: the text has fewer passages than are needed to hold one out.
    """
    found, lines, size = [], [], 0
    for line in filter(None, map(str.strip, text.splitlines())):
        lines.append(line)
        size += len(line)
        if size >= least:
            found.append("\n".join(lines))
            lines, size = [], 0
    if len(found) < _HELD_OUT:
        raise ValueError(
            f"the text has {len(found)} passages of {least} characters, and one in {_HELD_OUT} is held out: give at "
            f"least {_HELD_OUT * least} characters of text in lines"
        )
    held_out = found[_HELD_OUT - 1 :: _HELD_OUT]
    return Passages([p for i, p in enumerate(found, 1) if i % _HELD_OUT], held_out)


def train_tokenizer(texts: Sequence[str], vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer of ``vocab`` tokens at most, trained on texts. The same texts give the same tokenizer.

    A space is put before every text, so a word has the same tokens at the start of a text and within one.

    Raises:
      ValueError: ``vocab`` has no room for all bytes and the two special tokens.
    """
    if vocab < 258:
        raise ValueError(f"a vocabulary needs 256 bytes and 2 special tokens, got {vocab}; give at least 258")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[PAD, END], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, None, backend.token_to_id(END), names={"pad_token": PAD})


def plain_rows(texts: Sequence[str], tokenizer: Tokenizer, size: int) -> Texts:
    """Rows for a decoder alone: the texts one after another, each with its end token, cut every ``size`` tokens.

    What is left at the end is dropped. Every token has the weight 1.
    """
    end = _id(tokenizer, END)
    ids = [token for text in tokenizer.backend.encode_batch(list(texts)) for token in (*text.ids, end)]
    rows = [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]
    return Texts.of(rows, [0] * len(rows), size, tokenizer.vocab_size)


def reversal_rows(texts: Sequence[str], tokenizer: Tokenizer, size: int) -> Texts:
    """Rows for a model with an encoder: some sentences as the source, and the same in reverse order as the text.

    Each row is a source, its end token, the decoder's first token, the text and its end token. Source and text fit
    into half of the row each. Only tokens of the text have a weight.
    """
    asked = list(reversals(texts, tokenizer, size))
    flat = tokenizer.backend.encode_batch([side for pair in asked for side in pair])
    start, end, rows, starts = _id(tokenizer, PAD), _id(tokenizer, END), [], []
    for source, text in zip(flat[::2], flat[1::2], strict=True):
        if max(len(source.ids), len(text.ids)) <= _room(size):
            rows.append([*source.ids, end, start, *text.ids, end])
            starts.append(len(source.ids) + 2)
    return Texts.of(rows, starts, size, tokenizer.vocab_size)


def reversals(texts: Sequence[str], tokenizer: Tokenizer, size: int) -> Iterator[tuple[str, str]]:
    """Pairs of a source and its text, for rows of ``size`` tokens. A source begins at every sentence.

    It has as many sentences of its passage as fit, at least two.
    """
    for passage in texts:
        found = sentences(passage)
        lengths = [len(encoded.ids) for encoded in tokenizer.backend.encode_batch(found)]
        for first in range(len(found)):
            last, total = first, 0
            while last < len(found) and total + lengths[last] <= _room(size):
                total += lengths[last]
                last += 1
            if last - first >= 2:
                yield " ".join(found[first:last]), reversed_text(found[first:last])


def sentences(passage: str) -> list[str]:
    """The sentences of a passage: the text up to each full stop, question or exclamation mark, or end of a line."""
    return [s.strip() for s in re.split(r"(?<=[.!?])\s+|\n+", passage) if s.strip()]


def reversed_text(parts: Sequence[str]) -> str:
    """Sentences in reverse order, as one text."""
    return " ".join(reversed(parts))


def _id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token of :func:`train_tokenizer`."""
    found = tokenizer.special_id(token)
    assert found is not None
    return found


def _room(size: int) -> int:
    """The most tokens of a source, or of a text, without the decoder's first token and the ends."""
    return size // 2 - 2
