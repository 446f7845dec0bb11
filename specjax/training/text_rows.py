"""Rows for training from scratch, and the tokenizer, made of plain text.

Text is cut into passages of whole lines. One passage in twenty is held out.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from specjax.text.tokenizer import Tokenizer
from specjax.training.texts import Texts

PAD, END = "<pad>", "<|endoftext|>"  # the ids 0 and 1; <pad> is also the first token of a T5's decoder
BETWEEN = " /"  # stands between the lines of a source
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


def reversal_rows(texts: Sequence[str], tokenizer: Tokenizer, size: int, orders: int = 8, seed: int = 0) -> Texts:
    """Rows for a model with an encoder: short lines as the source, and the same lines in reverse order as the text.

    The lines of a source are drawn from all texts, so a line says nothing about the next one: without the source the
    text can't be known. Each row is a source, its end token, the decoder's first token, the text and its end token.
    Source and text fit into half of the row each. Only tokens of the text have a weight.

    Args:
      texts: the texts, which are cut into lines.
      tokenizer: a tokenizer of :func:`train_tokenizer`.
      size: the tokens of a row.
      orders: in how many random orders all lines are gone through.
      seed: the seed of the orders.
    """
    start, end, between = _id(tokenizer, PAD), _id(tokenizer, END), tokenizer.encode(BETWEEN)
    rng, room = np.random.default_rng(seed), size // 2 - 2  # the room is without the first token and the ends
    found = [line for text in texts for line in short_lines(text, rng)]
    lines = [line.ids for line in tokenizer.backend.encode_batch(found)]
    rows, starts = [], []
    for _ in range(orders):
        for chosen in _filled((lines[i] for i in rng.permutation(len(lines))), room, len(between), rng):
            source, text = (_joined(part, between) for part in (chosen, chosen[::-1]))
            rows.append([*source, end, start, *text, end])
            starts.append(len(source) + 2)
    return Texts.of(rows, starts, size, tokenizer.vocab_size)


def short_lines(text: str, rng: np.random.Generator, words: int = 8) -> list[str]:
    """Cuts a text at the ends of lines and sentences, and after 1 to ``words`` words, a number drawn each time."""
    found = []
    for part in re.split(r"(?<=[.!?])\s+|\n+", text):
        rest = part.split()
        while rest:
            size = int(rng.integers(1, words + 1))
            found.append(" ".join(rest[:size]))
            rest = rest[size:]
    return found


def _filled(
    lines: Iterable[list[int]], room: int, between: int, rng: np.random.Generator
) -> Iterator[list[list[int]]]:
    """Groups of at least two lines, with ``between`` tokens between two lines.

    The most tokens of a group are drawn from 1 to ``room``. From short sources a model learns where to look in long
    ones.
    """
    group: list[list[int]] = []
    used, most = 0, int(rng.integers(1, room + 1))
    for line in lines:
        if used + len(line) > most:
            if len(group) > 1:
                yield group
            group, used, most = [], 0, int(rng.integers(1, room + 1))
        if len(line) <= most:
            group.append(line)
            used += len(line) + between


def _joined(lines: Sequence[list[int]], between: list[int]) -> list[int]:
    """The tokens of lines with the same tokens between any two."""
    return [token for i, line in enumerate(lines) for token in (*(between if i else ()), *line)]


def _id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token of :func:`train_tokenizer`."""
    found = tokenizer.special_id(token)
    assert found is not None
    return found
