"""Training texts sampled from the target: the target invents a user's question, then answers it, in its chat template.

No text from outside is needed (Xu et al. 2024, Magpie): the template up to the user's turn is a sufficient prompt. Some
prompts go on with the first words of a question (``OPENINGS``), because a small model without them asks similar
questions again and again.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from specjax.generation.generate import generate
from specjax.models.lm import LM
from specjax.report.progress import bar

OPENINGS = (
    "", "", "", "", "", "", "", "",
    "What is", "What are", "Why", "How", "How do I", "Can you", "Who", "When", "Where", "Which", "Is", "Explain",
    "Describe", "Write a", "Write a short story about", "Write a poem about", "Write an email to", "Write a blog post",
    "Write a Python function that", "Write code to", "Give me", "List", "Suggest", "Compare", "Imagine", "Act as",
    "You are", "Pretend you are", "Rewrite the following sentence", "Correct the grammar", "Extract all",
    "Summarize the following text:", "Summarize this article in three sentences:\n\n", "Summarize.\n\n",
    "Translate the following sentence into English: Die", "Translate from German: Der", "Translate into French:",
    "Solve this math problem:", "A train", "Tom has", "Mary bought", "If x", "Calculate", "There are", "John",
    "Classify the following", "Answer the question using the text below.\n\nText:", "Read this paragraph:\n\n",
    "Question:", "Given the following", "I need", "I want to", "My", "I have a", "Let's", "Tell me about",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Texts:
    """Token ids of N texts, padded with 0 to T."""

    # u16 or i32[N, T] The texts.
    tokens: np.ndarray
    # i32[N] The number of tokens of each text.
    lengths: np.ndarray
    # bool[N, T] Whether the target itself said the token. Drafters learn only such tokens.
    own: np.ndarray

    def save(self, path: str | Path) -> None:
        """Writes the texts to one file."""
        with open(path, "wb") as file:  # a file, because numpy adds a suffix to a name
            np.savez(file, **dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> "Texts":
        """Reads a file that :meth:`save` wrote."""
        with np.load(path) as stored:
            return cls(**{field.name: stored[field.name] for field in dataclasses.fields(cls)})

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], starts: Sequence[int], size: int, vocab: int) -> "Texts":
        """Makes texts of lists of token ids.

        Args:
          rows: the token ids of each text.
          starts: for each text, the place of the first token that the target said.
          size: T. Tokens past ``size`` are dropped.
          vocab: the vocabulary size, which decides the dtype.
        """
        tokens = np.zeros((len(rows), size), np.uint16 if vocab <= 1 << 16 else np.int32)
        for padded, row in zip(tokens, rows, strict=True):
            padded[: min(len(row), size)] = row[:size]
        lengths = np.minimum([len(row) for row in rows], size).astype(np.int32)
        index = np.arange(size)
        return cls(tokens, lengths, (index >= np.asarray(starts)[:, None]) & (index < lengths[:, None]))

    @classmethod
    def joined(cls, parts: Sequence["Texts"]) -> "Texts":
        """All texts of several parts with one T."""
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(cls)))

    def rows(self, which: slice | np.ndarray) -> "Texts":
        """Some of the texts."""
        return Texts(self.tokens[which], self.lengths[which], self.own[which])

    def packed(self, size: int) -> "Texts":
        """Joins texts to longer ones: each row has as many texts as fit into ``size`` tokens, in their order.

        So a drafter sees long contexts too. The target reads the same rows in training, so the drafter learns the
        target's answers in these contexts.

        Raises:
          ValueError: a text is longer than ``size``.
        """
        if self.lengths.max(initial=0) > size:
            raise ValueError(f"a text of {self.lengths.max()} tokens doesn't fit a row of {size}; give a larger size")
        ends = np.zeros(len(self.lengths), int)  # where each text ends in its row
        row_of, row, end = np.zeros(len(self.lengths), int), -1, size
        for i, length in enumerate(self.lengths):
            row, end = (row, end + length) if row >= 0 and end + length <= size else (row + 1, int(length))
            row_of[i], ends[i] = row, end
        tokens, own = (np.zeros((row + 1, size), x.dtype) for x in (self.tokens, self.own))
        for i, (r, end, length) in enumerate(zip(row_of, ends, self.lengths, strict=True)):
            tokens[r, end - length : end], own[r, end - length : end] = self.tokens[i, :length], self.own[i, :length]
        lengths = np.zeros(row + 1, np.int32)
        np.maximum.at(lengths, row_of, ends.astype(np.int32))
        return Texts(tokens, lengths, own)

    def shuffled(self, seed: int) -> "Texts":
        """The texts in a random order."""
        return self.rows(np.random.default_rng(seed).permutation(len(self.tokens)))

    def weights(self) -> np.ndarray:
        """The weight of each token in a loss, f32[N, T]: 1 if the target said the token, else 0."""
        return self.own.astype(np.float32)

    @property
    def own_tokens(self) -> int:
        """How many tokens the target said."""
        return int(self.own.sum())


def dialogues(
    lm: LM,
    count: int,
    size: int = 383,
    question: int | None = None,
    batch: int = 1024,
    seed: int = 0,
    prompts: Sequence[str] = (),
    temperatures: Sequence[float] = (0.0, 0.7, 1.0),
    seconds: float = float("inf"),
    progress: Callable[[str], None] = lambda line: None,
) -> Texts:
    """Samples at least ``count`` dialogues of one question and one answer, in whole batches.

    Args:
      lm: the target. Its tokenizer has a chat template.
      count: how many dialogues.
      size: the most tokens of a dialogue, the template included.
      question: the most tokens of a question. None: a quarter of ``size``.
      batch: how many dialogues are sampled at a time.
      seed: the seed of the first dialogue. Each dialogue has its own.
      prompts: given questions. They are answered before the target invents any.
      temperatures: the temperatures of the answers, used in turn. Questions are invented at temperature 1.
      seconds: after this time no further batch begins.
      progress: is called with a line of text after each batch.

    Raises:
      ValueError: the model has no tokenizer or no chat template, or a dialogue does not fit the model's context.
    """
    question = size // 4 if question is None else question
    _check_size(lm, size, question)
    parts, made, began = [], 0, time.perf_counter()
    line = bar(desc="sampling", total=count, unit="dialogue")
    while made < count and (not made or time.perf_counter() - began < seconds):
        parts.append(_sampled(lm, range(made, made + batch), size, question, seed, prompts, temperatures))
        made += batch
        line.update(min(made, count) - line.n)
        progress(f"{made} dialogues, {sum(p.own_tokens for p in parts)} tokens")
    line.close()
    return Texts.joined(parts)


def _check_size(lm: LM, size: int, question: int) -> None:
    """Raises ValueError if a dialogue of ``size`` tokens does not fit the context, or holds no answer to a question."""
    before, after = _template(lm)
    if size > lm.config.max_position_embeddings or len(before) + question + len(after) >= size:
        raise ValueError(
            f"a dialogue of {size} tokens must fit the model's context of {lm.config.max_position_embeddings} and hold "
            f"its chat template ({len(before) + len(after)} tokens), a question of {question} and an answer"
        )


def _sampled(
    lm: LM, rows: range, size: int, question: int, seed: int, prompts: Sequence[str], temperatures: Sequence[float]
) -> Texts:
    """One batch of dialogues, those with the numbers ``rows``. The other arguments are those of :func:`dialogues`."""
    before, after = _template(lm)
    seeds = [seed + i for i in rows]
    given = [before + _plain(lm, prompts[i])[:question] for i in rows if i < len(prompts)]
    openings = [before + _plain(lm, OPENINGS[i % len(OPENINGS)]) for i in rows][len(given) :]
    invented = _invented(lm, openings, len(before) + question, seeds)
    asked = [ids + after for ids in given + invented]
    answers = generate(
        lm, asked, temperature=[temperatures[i % len(temperatures)] for i in rows],
        max_new_tokens=[max(0, size - len(ids)) for ids in asked], seed=seeds,
    ).tokens  # fmt: skip
    texts = [ids + new for ids, new in zip(asked, answers, strict=True)]
    # The target said the invented questions, but not the given ones.
    starts = [len(ids) for ids in asked[: len(given)]] + [len(before)] * len(invented)
    return Texts.of(texts, starts, size, lm.config.vocab_size)


def _invented(lm: LM, openings: list[list[int]], room: int, seeds: list[int]) -> list[list[int]]:
    """Openings with the rest of a question, up to ``room`` tokens each, without stop tokens.

    There are as many seeds as dialogues in a batch, and at most as many openings. The batch is filled up with copies of
    the first opening, so that all batches run the same program.
    """
    if not openings:
        return []
    filler = len(seeds) - len(openings)
    limits = [max(1, room - len(ids)) for ids in openings] + [1] * filler
    said = generate(
        lm, openings + openings[:1] * filler, temperature=1.0, seed=seeds, max_new_tokens=limits
    ).tokens  # fmt: skip
    stops = set(lm.config.eos_token_ids)
    return [ids + [t for t in new if t not in stops] for ids, new in zip(openings, said, strict=False)]


# Tasks for a passage alone, and tasks for a passage with a question.
TASKS = (
    "Summarize the following text:\n\n{text}",
    "{text}\n\nSummarize the text above in three sentences.",
    "{text}\n\nWhat are the main points of this text?",
    "Rewrite this text in simpler words:\n\n{text}",
    "Answer the question using the passages below.\n\n{text}\n\nQuestion: {question}",
    "{question}\n\nUse only these passages:\n\n{text}",
    "{text}\n\n{question}",
    "List the key facts of this article.\n\n{text}",
)


def over_passages(lm: LM, texts: Texts, count: int, longest: int, seed: int = 0) -> list[str]:
    """Makes questions on passages. The passages are answers of earlier dialogues.

    Each question joins several passages with a task, or with the question that one of the passages answers.

    Args:
      lm: the target, which said the dialogues.
      texts: dialogues of :func:`dialogues`.
      count: how many questions.
      longest: the most tokens of the passages of a question. The number of tokens of each question is drawn between a
        quarter of ``longest`` and ``longest``.
      seed: the seed of all choices.

    Raises:
      ValueError: no text is a dialogue.
    """
    rng, turns, asked = np.random.default_rng(seed), _turns(lm, texts), []
    for i in range(count):
        room, passages, question = int(rng.integers(longest // 4, longest + 1)), [], ""
        while room > 0:
            said, answer = turns[rng.integers(len(turns))]
            passages.append(lm.tokenizer.decode(answer[:room]))  # type: ignore[union-attr]
            question = question or lm.tokenizer.decode(said)  # type: ignore[union-attr]
            room -= len(answer)
        order = rng.permutation(len(passages))
        text = "\n\n".join(passages[j].strip() for j in order)
        asked.append(TASKS[i % len(TASKS)].format(text=text, question=question.strip()))
    return asked


def _turns(lm: LM, texts: Texts) -> list[tuple[list[int], list[int]]]:
    """The question and the answer of each dialogue, as token ids.

    Raises:
      ValueError: no text is a dialogue.
    """
    before, after = _template(lm)
    turns = []
    for row, length in zip(texts.tokens, texts.lengths, strict=True):
        ids = row[len(before) : length].tolist()
        cut = next((i for i in range(len(ids)) if ids[i : i + len(after)] == after), None)
        if cut is not None and cut + len(after) < len(ids):
            turns.append((ids[:cut], ids[cut + len(after) :]))
    if not turns:
        raise ValueError(
            "none of the texts is a dialogue of a question and an answer, so there are no passages; give the texts "
            "that dialogues(lm, ...) samples"
        )
    return turns


def _plain(lm: LM, text: str) -> list[int]:
    """The token ids of a text, without the tokens that a tokenizer sets before every text, such as BOS."""
    ids, nothing = lm.tokenizer.encode(text), lm.tokenizer.encode("")  # type: ignore[union-attr]
    return ids[len(nothing) :]


def _template(lm: LM) -> tuple[list[int], list[int]]:
    """The chat template before and after a user's turn, as token ids.

    Raises:
      ValueError: the model has no tokenizer or no chat template.
    """
    if lm.tokenizer is None:
        raise ValueError(
            "training text is sampled in the chat template, but the model has no tokenizer; load a model that has one"
        )
    marks = [lm.tokenizer.apply_chat_template(mark) for mark in ("a", "b")]
    differ = next(i for i, (a, b) in enumerate(zip(*marks, strict=False)) if a != b)
    return marks[0][:differ], marks[0][differ + 1 :]
