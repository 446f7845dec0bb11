"""Training text sampled from the target: it invents a user's turn, then answers it, in its own chat template.

No text from outside is needed (Xu et al. 2024, Magpie): the template up to the user's turn is prompt enough. Openings
steer what is asked for; without them a small model asks for much the same again and again.
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

    tokens: np.ndarray  # u16 or i32[N, T]
    lengths: np.ndarray  # i32[N]
    own: np.ndarray  # bool[N, T] the target's own words, which are what is learned

    def save(self, path: str | Path) -> None:
        with open(path, "wb") as file:  # to a name alone, numpy would add a suffix
            np.savez(file, **dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> "Texts":
        with np.load(path) as stored:
            return cls(**{field.name: stored[field.name] for field in dataclasses.fields(cls)})

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], starts: Sequence[int], size: int, vocab: int) -> "Texts":
        """From lists of ids, the target's own from ``starts`` on; what goes past ``size`` is dropped."""
        tokens = np.zeros((len(rows), size), np.uint16 if vocab <= 1 << 16 else np.int32)
        for target, row in zip(tokens, rows, strict=True):
            target[: min(len(row), size)] = row[:size]
        lengths = np.minimum([len(row) for row in rows], size).astype(np.int32)
        index = np.arange(size)
        return cls(tokens, lengths, (index >= np.asarray(starts)[:, None]) & (index < lengths[:, None]))

    @classmethod
    def joined(cls, parts: Sequence["Texts"]) -> "Texts":
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(cls)))

    def rows(self, which: slice | np.ndarray) -> "Texts":
        return Texts(self.tokens[which], self.lengths[which], self.own[which])

    def packed(self, size: int) -> "Texts":
        """As many in a row of ``size`` tokens as fit, in order: so a drafter meets long contexts too.

        Of what the target says it learns there what the target says there, whatever stands before.

        Raises:
          ValueError: if a text is longer.
        """
        if self.lengths.max(initial=0) > size:
            raise ValueError(f"a text of {self.lengths.max()} tokens doesn't fit a row of {size}")
        ends = np.zeros(len(self.lengths), int)  # of each text, in its row
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
        return self.rows(np.random.default_rng(seed).permutation(len(self.tokens)))

    def weights(self) -> np.ndarray:
        """f32[N, T]: 1 on the target's own words, else 0."""
        return self.own.astype(np.float32)

    @property
    def own_tokens(self) -> int:
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
    """Samples ``count`` dialogues of one question and one answer.

    Args:
      lm: the target; its tokenizer has a chat template.
      count: how many.
      size: tokens a dialogue at most, the template's included.
      question: tokens that an invented question has at most; a quarter of ``size`` by default.
      batch: dialogues sampled at a time.
      seed: of the first; each dialogue has its own.
      prompts: questions to be answered before any is invented.
      temperatures: of the answers, taken in turn; questions are invented at 1.
      seconds: after which no further batch is begun.
      progress: told of each batch.

    Raises:
      ValueError: if the model has no tokenizer or no chat template, or a dialogue doesn't fit its context.
    """
    before, after = _template(lm)
    question = size // 4 if question is None else question
    if size > lm.config.max_position_embeddings or len(before) + question + len(after) >= size:
        raise ValueError(
            f"a dialogue of {size} tokens must fit the model's context of {lm.config.max_position_embeddings} and hold "
            f"its chat template ({len(before) + len(after)} tokens), a question of {question} and an answer"
        )
    parts, made, began = [], 0, time.perf_counter()
    line = bar(desc="sampling", total=count, unit="dialogue")
    while made < count and (not made or time.perf_counter() - began < seconds):
        rows = range(made, made + batch)
        given = [_plain(lm, prompts[i])[:question] for i in rows if i < len(prompts)]
        openings = [before + _plain(lm, OPENINGS[i % len(OPENINGS)]) for i in rows][len(given) :]
        seeds = list(range(seed + made, seed + made + batch))
        room = len(before) + question
        invented: list[list[int]] = []
        if openings:
            limits = [max(1, room - len(ids)) for ids in openings]
            said = generate(lm, openings + openings[:1] * len(given), temperature=1.0, seed=seeds,
                            max_new_tokens=limits + [1] * len(given)).tokens  # fmt: skip
            stops = set(lm.config.eos_token_ids)
            invented = [ids + [t for t in new if t not in stops] for ids, new in zip(openings, said, strict=False)]
        asked = [ids + after for ids in [before + ids for ids in given] + invented]
        answers = generate(
            lm, asked, temperature=[temperatures[i % len(temperatures)] for i in rows],
            max_new_tokens=[max(0, size - len(ids)) for ids in asked], seed=seeds,
        ).tokens  # fmt: skip
        texts = [ids + new for ids, new in zip(asked, answers, strict=True)]
        # A question that was given is not the model's own.
        starts = [len(ids) for ids in asked[: len(given)]] + [len(before)] * len(invented)
        parts.append(Texts.of(texts, starts, size, lm.config.vocab_size))
        made += batch
        line.update(min(made, count) - line.n)
        progress(f"{made} dialogues, {sum(p.own_tokens for p in parts)} tokens")
    line.close()
    return Texts.joined(parts)


# What is asked of a passage, and of one with a question.
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
    """Questions on passages: the answers of several dialogues, with a task or with the question of one of them.

    Args:
      lm: the target, of whose dialogues the texts are.
      texts: of :func:`dialogues`.
      count: how many.
      longest: tokens of passages; each question has about as many as it was drawn to, up to that.
      seed: of the choice.
    """
    before, after = _template(lm)
    rng, turns = np.random.default_rng(seed), []
    for row, length in zip(texts.tokens, texts.lengths, strict=True):
        ids = row[len(before) : length].tolist()
        cut = next((i for i in range(len(ids)) if ids[i : i + len(after)] == after), None)
        if cut is not None and cut + len(after) < len(ids):
            turns.append((ids[:cut], ids[cut + len(after) :]))
    if not turns:
        raise ValueError("none of the texts is a dialogue of a question and an answer, so there are no passages")
    asked = []
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


def _plain(lm: LM, text: str) -> list[int]:
    """Token ids without the BOS that a tokenizer may set before any text."""
    ids, nothing = lm.tokenizer.encode(text), lm.tokenizer.encode("")  # type: ignore[union-attr]
    return ids[len(nothing) :]


def _template(lm: LM) -> tuple[list[int], list[int]]:
    """The chat template around a user's turn, as token ids."""
    if lm.tokenizer is None:
        raise ValueError("training text is sampled in the chat template, but the model has no tokenizer")
    marks = [lm.tokenizer.apply_chat_template(mark) for mark in ("a", "b")]
    differ = next(i for i, (a, b) in enumerate(zip(*marks, strict=False)) if a != b)
    return marks[0][:differ], marks[0][differ + 1 :]
