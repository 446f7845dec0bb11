"""The tokenizer that a GGUF file describes, over the ``tokenizers`` library.

GGUF names the tokenizer's kind: ``gpt2`` is byte-level BPE, ``llama`` is SentencePiece's BPE. For ``gpt2``, GGUF also
names how text is split into words before the merges. Both kinds are built here as in the models' own
``tokenizer.json`` files.
"""

from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from convert.gguf import GGUF
from specjax.models import config_values as values
from specjax.models.config_values import Rule
from specjax.text.tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # GGUF's types of tokens
_SPACE = "\u2581"  # SentencePiece's sign for a space
# The pattern of a word, from Llama 3's tokenizer.json.
_LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# GGUF's names for this way to split text.
_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3")


def _list_of(kind: type | tuple[type, ...], items: str) -> Rule:
    """The rule for a list, not empty, of values of one type. ``items`` is what an error calls them."""

    def holds(value):
        return isinstance(value, list) and len(value) > 0 and all(isinstance(item, kind) for item in value)

    return Rule(f"a list of {items}", holds)


_RULES = {
    "model": values.TEXT,
    "pre": values.TEXT,
    "tokens": _list_of(str, "texts"),
    "token_type": _list_of(int, "integers"),
    "scores": _list_of((int, float), "numbers"),
    "merges": Rule(
        "a list of texts of two tokens each, with one space between them",
        lambda v: isinstance(v, list) and all(isinstance(m, str) and " " in m[1:] for m in v),
    ),
    "add_bos_token": values.FLAG,
    "add_space_prefix": values.FLAG,
}


def read(file: GGUF) -> Tokenizer | None:
    """The file's tokenizer; None if the file has no tokenizer.

    Raises:
      ValueError: the kind of tokenizer is not implemented, or a key is missing or can't be used. The message names the
        file and the key.
    """
    return _Reader(file).read() if "tokenizer.ggml.model" in file.metadata else None


class _Reader:
    """Builds the tokenizer of one GGUF file."""

    def __init__(self, file: GGUF):
        self.file = file

    def read(self) -> Tokenizer:
        kind = self.get("model")
        makers = {"gpt2": self.byte_level, "llama": self.sentence_piece}
        if kind not in makers:
            raise ValueError(
                f"{self.file.path}: tokenizer.ggml.model = {kind!r} is not implemented ({' and '.join(makers)} are); "
                "use the model's Hugging Face folder instead"
            )
        self.tokens = self.need("tokens")
        self.types = self.need("token_type", of_each_token=True)
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            twice = next(token for i, token in enumerate(self.tokens) if self.ids[token] != i)
            self.refuse("tokens", f"holds {twice!r} twice")
        backend, add_bos = makers[kind]()
        special = [(_CONTROL, True), (_USER_DEFINED, False)]
        for wanted, is_special in special if kind == "gpt2" else [(_UNKNOWN, True), *special]:
            added = [t for t, found in zip(self.tokens, self.types, strict=True) if found == wanted]
            backend.add_tokens([tokenizers.AddedToken(t, special=is_special, normalized=False) for t in added])
        bos, eos = (self.get(f"{name}_token_id", values.token_id(len(self.tokens))) for name in ("bos", "eos"))
        stated = self.get("add_bos_token")
        chat = self.file.metadata.get("tokenizer.chat_template")
        if chat is not None and not isinstance(chat, str):
            raise ValueError(f"{self.file.path}: {values.TEXT.problem('tokenizer.chat_template', chat)}")
        return Tokenizer(backend, bos, eos, add_bos if stated is None else stated, chat)

    def byte_level(self) -> tuple[Any, bool]:
        """(tokenizer of the library, whether text starts with BOS if the file doesn't say)."""
        pre = self.get("pre") or "default"
        splits: dict[str, Callable[[], list]] = {
            "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True), _bytes(use_regex=True)],
            **dict.fromkeys(("gpt-2", "gpt2", "default"), lambda: [_bytes(use_regex=True)]),
            **dict.fromkeys(_LLAMA_3, _llama_3_split),
        }
        if pre not in splits:
            raise ValueError(
                f"{self.file.path}: tokenizer.ggml.pre = {pre!r} is not implemented ({', '.join(splits)} are); use the "
                "model's Hugging Face folder instead"
            )
        merges = [tuple(merge.split(" ", 1)) for merge in self.need("merges")]
        if not merges and any(len(t) > 1 and kind == _NORMAL for t, kind in zip(self.tokens, self.types, strict=True)):
            self.refuse("merges", "is empty, but the vocabulary has tokens of several letters")
        whole_words = pre in _LLAMA_3  # a word that is itself a token is not built by merges
        try:
            backend: Any = tokenizers.Tokenizer(models.BPE(self.ids, merges, ignore_merges=whole_words))
        except Exception as problem:  # the library raises plain Exception
            self.refuse("merges", f"can't be used with the tokens: {problem}")
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits[pre]())
        backend.decoder = decoders.ByteLevel()
        return backend, whole_words

    def sentence_piece(self) -> tuple[Any, bool]:
        """As :meth:`byte_level`. The merge to a token of higher score goes first. Bytes stand for unknown letters."""
        scores = self.need("scores", of_each_token=True)
        unknown = self.get("unknown_token_id", values.token_id(len(self.tokens)))
        normal = {t for t, kind in zip(self.tokens, self.types, strict=True) if kind == _NORMAL}
        merges = [
            (score, len(token[:cut]), len(token[cut:]), token[:cut], token[cut:])
            for token, score in zip(self.tokens, scores, strict=True)
            if token in normal
            for cut in range(1, len(token))
            if token[:cut] in normal and token[cut:] in normal
        ]
        merges.sort(key=lambda merge: merge[:3], reverse=True)
        backend: Any = tokenizers.Tokenizer(
            models.BPE(
                self.ids,
                [merge[3:] for merge in merges],
                unk_token=self.tokens[unknown or 0],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        prefix = self.get("add_space_prefix") is not False
        first = [normalizers.Prepend(_SPACE)] if prefix else []
        backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
        last = [decoders.Strip(" ", 1, 0)] if prefix else []
        parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*parts, *last])
        return backend, True

    def get(self, key: str, rule: Rule | None = None) -> Any:
        """The value of ``tokenizer.ggml.KEY``; None if it is absent. Raises ValueError if it breaks the key's rule."""
        rule, value = rule or _RULES[key], self.file.metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and not rule.holds(value):
            raise ValueError(f"{self.file.path}: {rule.problem(f'tokenizer.ggml.{key}', value)}")
        return value

    def need(self, key: str, of_each_token: bool = False) -> Any:
        """As :meth:`get`, but the key must be there. With ``of_each_token``, it must have an entry for each token."""
        value = self.get(key)
        if value is None:
            self.refuse(key, "is missing")
        if of_each_token and len(value) != len(self.tokens):
            self.refuse(key, f"has {len(value)} entries, expected one for each of {len(self.tokens)} tokens")
        return value

    def refuse(self, key: str, why: str):
        """Raises ValueError about a key. ``why`` completes the sentence that begins with the key."""
        raise ValueError(
            f"{self.file.path}: tokenizer.ggml.{key} {why}; use another GGUF file of the model, or its Hugging Face "
            "folder"
        )


def _bytes(use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _llama_3_split() -> list:
    return [pre_tokenizers.Split(tokenizers.Regex(_LLAMA_3_WORDS), "isolated"), _bytes(use_regex=False)]
