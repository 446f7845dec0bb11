"""Training texts sampled from the target: the target invents a user's question, then answers it, in its chat template.

No text from outside is needed (Xu et al. 2024, Magpie): the template up to the user's turn is a sufficient prompt. Some
prompts go on with the first words of a question (``OPENINGS``), because a small model without them asks similar
questions again and again.
"""

import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specjax.engine.engine import Engine
from specjax.models.lm import LM
from specjax.offline import files
from specjax.offline.rows import Row
from specjax.training.mark import mark

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
        """Writes the texts to one file, whole or not at all."""
        begun = Path(f"{path}.new")
        with open(begun, "wb") as file:  # a file, because numpy adds a suffix to a name
            np.savez(file, **dataclasses.asdict(self))
        begun.replace(path)

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
    folder: Path | None = None,
) -> Texts:
    """Samples dialogues of one question and one answer, through an engine.

    A dialogue depends on its number and on the arguments alone, so a call that goes on after a stop gives the same
    texts.

    Args:
      lm: the target. Its tokenizer has a chat template.
      count: how many dialogues.
      size: the most tokens of a dialogue, the template included.
      question: the most tokens of a question. None: a quarter of ``size``.
      batch: how many dialogues the engine writes at the same time.
      seed: the seed of the first dialogue. Each dialogue has its own.
      prompts: given questions. They are answered before the target invents any.
      temperatures: the temperatures of the answers, used in turn. Questions are invented at temperature 1.
      seconds: after this time the dialogues that are done are all.
      folder: where finished dialogues are kept: the same call goes on after a stop. None: they are kept nowhere.

    Raises:
      ValueError: the model has no tokenizer or no chat template, a dialogue does not fit the model's context, or the
        folder holds dialogues of other arguments.
    """
    question = size // 4 if question is None else question
    _check_size(lm, size, question)
    with contextlib.ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory())) if folder is None else folder
        where = base / f"{size}-{question}"
        said, begun = where / "said.jsonl", _begun(where, lm, count, question, seed, prompts, temperatures)
        engine = stack.enter_context(Engine(lm, "none", slots=batch, capacity=size, max_waiting=4 * batch))
        until = time.monotonic() + seconds
        files.fill(partial(_said, engine, len(prompts), size, question, until), begun, said, seed=seed)
        rows = sorted(map(json.loads, said.read_text("utf-8").splitlines()), key=lambda row: row["id"])
    return Texts.of([row["tokens"] for row in rows], [row["start"] for row in rows], size, lm.config.vocab_size)


def _begun(
    folder: Path,
    lm: LM,
    count: int,
    question: int,
    seed: int,
    prompts: Sequence[str],
    temperatures: Sequence[float],
) -> Path:
    """Writes the file of rows, each a question or how it begins. The arguments are those of :func:`dialogues`.

    Raises:
      ValueError: the folder holds the rows of other arguments.
    """
    before, _ = _template(lm)
    texts = [_plain(lm, prompt)[:question] for prompt in prompts[:count]]
    openings = [_plain(lm, opening) for opening in OPENINGS]
    texts += [openings[i % len(openings)] for i in range(len(texts), count)]
    rows = [
        {"id": i, "prompt": before + text, "temperature": temperatures[i % len(temperatures)], "seed": seed + i}
        for i, text in enumerate(texts)
    ]
    path = folder / "begun.jsonl"
    what = "dialogues that were begun with other settings (number, seed, questions or temperatures)"
    mark(path, "".join(json.dumps(row) + "\n" for row in rows), what)
    return path


def _said(
    engine: Engine, given: int, size: int, question: int, until: float, rows: Iterator[Row]
) -> Iterator[dict[str, Any]]:
    """The dialogues of some rows, as they end.

    Args:
      engine: the engine of the target.
      given: rows with ids below this number have whole questions.
      size, question: as in :func:`dialogues`.
      until: when to end, by ``time.monotonic``.
      rows: rows of the file of :func:`_begun`.
    """
    before, after = _template(engine.lm)
    stops = set(engine.lm.config.eos_token_ids)
    begun: dict[int, dict[str, Any]] = {row.id: row.request for row in rows}  # type: ignore[misc]
    inventing = [name for name in begun if name >= given]
    asked: list[tuple[int, list[int]]] = []

    def questions() -> Iterator[tuple[int, list[int]]]:
        """The ids of the rows and their whole questions, as these are ready."""
        yield from ((name, row["prompt"]) for name, row in begun.items() if name < given)
        longest = len(before) + question
        openings = (
            {**begun[name], "temperature": 1.0, "max_new_tokens": max(1, longest - len(begun[name]["prompt"]))}
            for name in inventing
        )
        for index, tokens in _tokens(engine, openings):
            yield inventing[index], begun[inventing[index]]["prompt"] + [t for t in tokens if t not in stops]

    def requests() -> Iterator[dict[str, Any]]:
        for name, text in questions():
            asked.append((name, text + after))
            yield {**begun[name], "prompt": text + after, "max_new_tokens": size - len(text + after)}

    for index, tokens in _tokens(engine, requests()):
        name, text = asked[index]
        # The target said the invented questions, but not the given ones.
        yield {"id": name, "start": len(text) if name < given else len(before), "tokens": text + tokens}
        if time.monotonic() > until:
            return


def _tokens(engine: Engine, requests: Iterator[dict[str, Any]]) -> Iterator[tuple[int, list[int]]]:
    """The index and the new tokens of each request, as requests end. Raises the error of a request that fails."""
    for index, outcome in engine.generate(requests):
        if isinstance(outcome, Exception):
            raise outcome
        yield index, outcome.tokens[0]


def _check_size(lm: LM, size: int, question: int) -> None:
    """Raises ValueError if a dialogue of ``size`` tokens does not fit the context, or holds no answer to a question."""
    before, after = _template(lm)
    if size > lm.config.max_position_embeddings or len(before) + question + len(after) >= size:
        raise ValueError(
            f"a dialogue of {size} tokens must fit the model's context of {lm.config.max_position_embeddings} and hold "
            f"its chat template ({len(before) + len(after)} tokens), a question of {question} and an answer"
        )


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
