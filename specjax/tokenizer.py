"""Text to token ids and back, over the ``tokenizers`` library.

``tokenizer.json`` is read as it stands. transformers' tokenizer classes are not used: some of them rebuild the
pre-tokenizer from the class name and so change the ids.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

Message = Mapping[str, Any]

# GGUF names a pre-tokenizer instead of describing it.
_GGUF_PRE = {"smollm": True, "gpt-2": False, "gpt2": False, "default": False}  # -> whether digits are split apart
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that are matched before the merges


class Tokenizer:
    """Encodes and decodes for one model.

    Args:
      backend: the tokenizer proper.
      bos_id, eos_id: None where the model has none.
      add_bos: whether text starts with the BOS token; None asks the backend's post-processor.
      chat_template: Jinja source, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos_id: int | None = None,
        eos_id: int | None = None,
        add_bos: bool | None = None,
        chat_template: str | None = None,
    ):
        self.backend = backend
        self.bos_id, self.eos_id = bos_id, eos_id
        if add_bos is None:
            add_bos = backend.encode("a").ids[:1] == [bos_id]
        self.add_bos = bool(add_bos) and bos_id is not None
        self.chat_template = chat_template

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def vocab_size(self) -> int:
        """Ids with a meaning. A model may have more rows than that: they are padding."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids, after one BOS if the model wants it. A BOS written out in the text is not doubled."""
        return self._one_bos(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; spaces are left as they are, padding ids give nothing."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def token_str(self, token: int) -> str:
        """The token as the vocabulary spells it; ``<id>`` for a padding id."""
        text = self.backend.id_to_token(int(token))
        return f"<{int(token)}>" if text is None else text

    def apply_chat_template(self, messages: str | Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation ({"role", "content"} each), or of one user message given as a string.

        BOS stands at the start exactly once, whether or not the template writes it.

        Raises:
          ValueError: the model has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template: it is no chat model; pass the prompt as plain text")
        render_jinja_template = template_renderer()
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        values: dict[str, Any] = {
            "bos_token": self._text_of(self.bos_id),
            "eos_token": self._text_of(self.eos_id),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            rendered = render_jinja_template([[dict(m) for m in messages]], chat_template=self.chat_template, **values)
        except Exception as e:  # whatever a template raises, it is about its input
            raise ValueError(f"the chat template can't render these messages: {e}") from e
        text = rendered[0][0] if isinstance(rendered, tuple) else rendered[0]  # older releases return a pair
        return self._one_bos(self.backend.encode(text, add_special_tokens=False).ids)

    def save(self, folder: str | Path) -> None:
        """Writes ``tokenizer.json`` and ``tokenizer_config.json``, readable by :meth:`load` and by transformers."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # the class that keeps tokenizer.json as it is
            "bos_token": self._text_of(self.bos_id) or None,
            "eos_token": self._text_of(self.eos_id) or None,
            "add_bos_token": self.add_bos,
            "clean_up_tokenization_spaces": False,
            "chat_template": self.chat_template,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), "utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """From a folder that transformers or :meth:`save` wrote.

        Raises:
          FileNotFoundError: no ``tokenizer.json``.
          ValueError: a file in it can't be read, or names a special token outside the vocabulary.
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
        config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
        ids = {}
        for name in ("bos_token", "eos_token"):
            text = config.get(name)
            text = text.get("content") if isinstance(text, dict) else text
            ids[name] = None if text is None else backend.token_to_id(text)
            if text is not None and ids[name] is None:
                raise ValueError(f"{folder}: {name} {text!r} is not in the vocabulary of tokenizer.json")
        template = folder / "chat_template.jinja"
        chat = template.read_text("utf-8") if template.is_file() else config.get("chat_template")
        if isinstance(chat, list):
            chat = {entry["name"]: entry["template"] for entry in chat}.get("default")
        return cls(backend, ids["bos_token"], ids["eos_token"], config.get("add_bos_token"), chat)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """From the metadata of a GGUF file with a byte-level BPE vocabulary.

        Raises:
          ValueError: another kind of tokenizer, named.
        """
        kind, pre = (metadata.get(f"tokenizer.ggml.{k}") for k in ("model", "pre"))
        pre = "default" if pre is None else pre
        if kind != "gpt2" or pre not in _GGUF_PRE:
            raise ValueError(
                f"GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not implemented; 'gpt2' with "
                f"{', '.join(_GGUF_PRE)} is. Use the model's Hugging Face folder instead"
            )
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        merges = [tuple(m.split(" ", 1)) for m in metadata["tokenizer.ggml.merges"]]
        backend: Any = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, merges))
        split: list[Any] = [tokenizers.pre_tokenizers.Digits(individual_digits=True)] if _GGUF_PRE[pre] else []
        split.append(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(split)
        backend.decoder = tokenizers.decoders.ByteLevel()
        for token_type, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            added = [t for t, kind in zip(tokens, types, strict=True) if kind == token_type]
            backend.add_tokens([tokenizers.AddedToken(t, special=special, normalized=False) for t in added])
        bos, eos = (metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("bos", "eos"))
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", False)
        return cls(backend, bos, eos, add_bos, metadata.get("tokenizer.chat_template"))

    def _one_bos(self, ids: list[int]) -> list[int]:
        if self.bos_id is None or not self.add_bos or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def _text_of(self, token: int | None) -> str:
        return "" if token is None else self.token_str(token)


def check_same_tokenizer(a: Tokenizer, b: Tokenizer) -> None:
    """Raises a ValueError unless every id means the same string in both, BOS and EOS included."""
    if a is b:
        return
    for i in range(max(len(a), len(b))):
        first, second = a.backend.id_to_token(i), b.backend.id_to_token(i)
        if first != second:
            raise ValueError(
                f"the tokenizers differ, first at id {i}: {first!r} and {second!r} (None: no such id; sizes {len(a)} "
                f"and {len(b)}). A draft must share its target's tokenizer"
            )
    for name in ("bos_id", "eos_id"):
        x, y = getattr(a, name), getattr(b, name)
        if x != y:
            words = [None if i is None else a.token_str(i) for i in (x, y)]
            raise ValueError(
                f"the tokenizers differ in {name}: {x} {words[0]!r} and {y} {words[1]!r}. A draft must share "
                "its target's tokenizer, special tokens included"
            )


def _read_json(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as e:
        raise ValueError(f"{path} is not valid JSON: {e}") from None


def template_renderer():
    """transformers' renderer, imported late because it is slow to, and without its remark that torch is missing."""
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(quiet)
    os.environ[quiet] = "1"
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    finally:
        if before is None:
            del os.environ[quiet]
        else:
            os.environ[quiet] = before
    return render_jinja_template
