"""Text to token ids and back, over the ``tokenizers`` library.

``tokenizer.json`` is used as it is. transformers' tokenizer classes are not used, because some of them rebuild the
pre-tokenizer from the class's name and so change the ids.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from specjax.text import chat, special_tokens
from specjax.text.control import Control
from specjax.text.text_stream import check_unicode


class Tokenizer:
    """Encodes and decodes for one model.

    Args:
      backend: the tokenizer of the ``tokenizers`` library. Its stored truncation and padding are switched off, because
        they are settings of a training.
      bos_id, eos_id: the ids of the BOS and EOS tokens; None if the model has no such token.
      add_bos: whether text starts with the BOS token; None: if the backend's post-processor adds it.
      chat_template: Jinja source; None: the model has no chat template.
      names: the texts of the special tokens, as ``{"pad_token": "<pad>", "additional_special_tokens": ["<x>"]}``. BOS
        and EOS are added. Chat templates get all names as variables.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos_id: int | None = None,
        eos_id: int | None = None,
        add_bos: bool | None = None,
        chat_template: str | None = None,
        names: special_tokens.Names | None = None,
    ):
        self.backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.bos_id, self.eos_id = bos_id, eos_id
        if add_bos is None:
            add_bos = backend.encode("a").ids[:1] == [bos_id]
        self.add_bos = bool(add_bos) and bos_id is not None
        self.chat_template = chat_template
        ends = {"bos_token": bos_id, "eos_token": eos_id}
        self.names = {**(names or {}), **{k: self.token_str(i) for k, i in ends.items() if i is not None}}
        self._known = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def vocab_size(self) -> int:
        """The number of ids with a meaning. If a model has more rows, the others are padding."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def ids(self) -> np.ndarray:
        """All ids with a meaning, i64[vocab_size] in rising order. There may be gaps between them."""
        if len(self._known) != self.vocab_size:  # kept, because the backend's vocabulary is slow to copy
            self._known = np.array(sorted(self.backend.get_vocab(with_added_tokens=True).values()), np.int64)
        return self._known

    def encode(self, text: str, parse_special: bool = True, with_eos: bool = False) -> list[int]:
        """The text's token ids, with BOS first if ``add_bos`` is True. A BOS at the start of the text is not doubled.

        Args:
          text: any text.
          parse_special: whether a control string in the text, such as ``<|im_end|>``, becomes the token of that name.
            If False, it stays text.
          with_eos: whether EOS ends the text, as the source of an encoder. An EOS at the end is not doubled.

        Raises:
          ValueError: the text holds a lone surrogate.
        """
        ids = self._one_bos(self._ids([text] if parse_special else self.control.parts(self.control.mark(text))))
        ends = with_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]
        return [*ids, self.eos_id] if ends else ids  # type: ignore[list-item]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Spaces are not cleaned up, and padding ids give nothing."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def prints(self, token: int) -> bool:
        """Whether :meth:`decode` prints the token. It prints neither special tokens nor padding ids."""
        return self.backend.id_to_token(int(token)) is not None and int(token) not in self._special_ids

    def byte_of(self, token: int) -> int | None:
        """The byte that a byte token stands for.

        None: the token is another one, or the tokenizer does not decode byte tokens, as only SentencePiece's do.
        """
        text = self.backend.id_to_token(int(token)) if self._decodes_bytes else None
        return int(text[3:5], 16) if text is not None and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text) else None

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _decodes_bytes(self) -> bool:
        decoder = self.backend.decoder
        return decoder is not None and b"ByteFallback" in decoder.__getstate__()

    def token_str(self, token: int) -> str:
        """The token as the vocabulary spells it. For a padding id: ``<id>`` with the number."""
        text = self.backend.id_to_token(int(token)) if 0 <= token < 1 << 32 else None
        return f"<{int(token)}>" if text is None else text

    @functools.cached_property
    def control(self) -> Control:
        """The control strings: the special tokens, and those added tokens that the chat template writes."""
        tokens = self.backend.get_added_tokens_decoder().values()
        return Control(t.content for t in tokens if t.special or t.content in (self.chat_template or ""))

    @property
    def asks_for_date(self) -> bool:
        """Whether the chat template reads the clock."""
        return "strftime_now" in (self.chat_template or "")

    def special_id(self, text: str) -> int | None:
        """The id of the special token with exactly this text; None if there is no such token."""
        token = self.backend.token_to_id(text)
        entry = None if token is None else self.backend.get_added_tokens_decoder().get(token)
        return token if entry is not None and entry.special else None

    def apply_chat_template(
        self,
        messages: str | Sequence[chat.Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        date: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parse_special: bool = False,
    ) -> list[int]:
        """The token ids of a conversation, as by transformers. BOS is only there if the template writes it.

        Args:
          messages: a list of {"role": ..., "content": ...}, or one user message as a string.
          add_generation_prompt: whether the assistant's turn is opened.
          tools: JSON schemas, or Python functions with type hints and docstrings.
          date: the ISO date that the template gets if it asks for the date; None: today.
          chat_template_kwargs: further variables of the template. They override special tokens of the same name.
          parse_special: whether control strings in messages, tools and variables become tokens. If False, they stay
            text, except in variables that override special tokens.

        Raises:
          ValueError: the model has no chat template, the template refuses its input or never asks for the given date,
            or a text holds a lone surrogate.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template: it is no chat model; pass the prompt as plain text")
        if date is not None and chat.moment(date) and not self.asks_for_date:
            raise ValueError(
                f"date is {date!r}, but this model's chat template never asks for the date; leave date out (a variable "
                "of the template goes into chat_template_kwargs)"
            )
        variables = chat_template_kwargs or {}
        if not isinstance(variables, Mapping):
            raise ValueError(f"chat_template_kwargs must map a template's variables to values, got {variables!r:.200}")
        mark = (lambda value: value) if parse_special else self.control.mark
        variables = chat.plain(variables, "chat_template_kwargs")
        given = {
            **self.names,
            "add_generation_prompt": add_generation_prompt,
            "messages": mark(chat.plain_messages(messages)),
            "tools": mark(chat.plain_tools(tools)),
            **{name: value if name in self.names else mark(value) for name, value in variables.items()},
        }
        text = chat.render(self.chat_template, given, date)
        return self._ids([text] if parse_special else self.control.parts(text))

    def save(self, folder: str | Path) -> None:
        """Writes ``tokenizer.json`` and ``tokenizer_config.json``. :meth:`load` and transformers read them."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # this class uses tokenizer.json as it is
            "bos_token": None,
            "eos_token": None,
            **self.names,
            "add_bos_token": self.add_bos,
            "clean_up_tokenization_spaces": False,
            "chat_template": self.chat_template,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), "utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """The tokenizer of a folder that transformers or :meth:`save` wrote.

        Raises:
          FileNotFoundError: the folder has no ``tokenizer.json``.
          ValueError: a file of the folder can't be read, or states an id that a special token can't have.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} has no tokenizer.json; transformers writes one: AutoTokenizer.from_pretrained(...)"
                ".save_pretrained(...)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises plain Exception
            raise ValueError(f"{file} can't be read: {e}") from None
        config = special_tokens.read_config(folder)
        names = special_tokens.complete(backend, folder, config)
        bos, eos = (backend.token_to_id(names[k]) if k in names else None for k in ("bos_token", "eos_token"))
        template = folder / "chat_template.jinja"
        source = template.read_text("utf-8") if template.is_file() else config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        return cls(backend, bos, eos, config.get("add_bos_token"), source, names)

    def _ids(self, parts: Sequence[str]) -> list[int]:
        """The ids of a text in parts, without BOS. No token reaches from one part into the next."""
        for part in parts:
            check_unicode("the text", part)
        ids = self.backend.encode(parts[0], add_special_tokens=False).ids
        for part in parts[1:]:
            # The part is encoded after a line break, because some tokenizers put a space before a text's first word.
            start, whole = (self.backend.encode(t, add_special_tokens=False).ids for t in ("\n", "\n" + part))
            is_apart = whole[: len(start)] == start  # whether no token joins the line break and the part
            ids += whole[len(start) :] if is_apart else self.backend.encode(part, add_special_tokens=False).ids
        return ids

    def _one_bos(self, ids: list[int]) -> list[int]:
        if self.bos_id is None or not self.add_bos or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]


def check_same_tokenizer(a: Tokenizer, b: Tokenizer, vocab: int | None = None) -> None:
    """Raises a ValueError unless every id that both tokenizers have means the same string in both.

    An id that only one tokenizer has is never drafted, or never accepted, so it is not compared. The ids of BOS and EOS
    may differ, because only the target's count.

    Args:
      a: the target's tokenizer.
      b: the draft model's tokenizer.
      vocab: only ids below this number are compared: the ids that both models can produce. None: all ids.
    """
    if a is b:
        return
    size = min(len(a), len(b), len(a) if vocab is None else vocab)
    wrong = _differences(a, b, size)
    if wrong:
        several = "; ".join(f"{'first at ' * (n == 0)}id {i}: {x!r} and {y!r}" for n, (i, x, y) in enumerate(wrong[:5]))
        raise ValueError(
            f"the tokenizers differ in {len(wrong)} of the {size} ids that target and draft both have, {several}"
            f"{'; ...' * (len(wrong) > 5)}. A draft must share its target's tokens. To draft all the same, give the "
            "drafter any_tokenizer=True (--any-draft-tokenizer): the text stays the target's, but a drafted token that "
            "means something else is rejected"
        )


@functools.lru_cache(maxsize=8)  # each request asks, and comparing the 128,256 ids of Llama 3 takes a tenth of a second
def _differences(a: Tokenizer, b: Tokenizer, size: int) -> tuple[tuple[int, str | None, str | None], ...]:
    """The ids below ``size`` that mean two different strings, with both strings."""
    pairs = ((i, a.backend.id_to_token(i), b.backend.id_to_token(i)) for i in range(size))
    return tuple((i, x, y) for i, x, y in pairs if x != y and None not in (x, y))
