"""The special tokens of a Hugging Face folder. Several files may name them, and ``tokenizer.json`` may lack some.

Fine-tunes put tokens into ``added_tokens_decoder`` of tokenizer_config.json, into added_tokens.json, or into
special_tokens_map.json. The rules here are those of transformers' ``from_pretrained``, so ids are the same as in
training.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from specjax.checkpoints.json_file import read_json

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

Names = dict[str, Any]  # "pad_token" -> the token's text, "additional_special_tokens" -> a list of texts


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of tokenizer_config.json and special_tokens_map.json together.

    If both have a key, tokenizer_config.json wins if it states ids of tokens (``added_tokens_decoder``). Otherwise
    special_tokens_map.json wins.
    """
    config, names = (_read(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    return {**names, **config} if "added_tokens_decoder" in config else {**config, **names}


def complete(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> Names:
    """Adds to the backend the tokens that are defined outside of tokenizer.json.

    Args:
      backend: the tokenizer of tokenizer.json. It is changed.
      folder: the Hugging Face folder.
      config: from :func:`read_config`.

    Returns:
      The special tokens by name.

    Raises:
      ValueError: a file can't be understood, or a token can't have the id that a file states. The error names all such
        tokens.
    """
    named, flags = _named(folder, config)
    special = [text for value in named.values() for text in ([value] if isinstance(value, str) else value)]
    problems = []
    for number, token in _stated(folder, config, special):
        token.special = token.special or token.content in special
        if problem := _misplaced(backend, number, token):
            problems.append(problem)
        else:
            backend.add_tokens([token])
    for name in ("bos_token", "eos_token"):
        if named.get(name) and backend.token_to_id(named[name]) is None:
            problems.append(f"{name} {named[name]!r} is not in the vocabulary of tokenizer.json, and no file has an id")
    if problems:
        raise ValueError(f"the tokenizer of {folder} can't be used:\n  " + "\n  ".join(problems))
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [s for s in dict.fromkeys(special) if s not in known]
    backend.add_tokens([AddedToken(s, **flags.get(s, {}), special=True) for s in missing])
    return named


def _misplaced(backend: tokenizers.Tokenizer, number: int, token: AddedToken) -> str | None:
    """Why the token can't have the id ``number``; None if it can."""
    found, taken = backend.token_to_id(token.content), backend.id_to_token(number)
    why = None
    if found is not None and found != number:
        why = f": tokenizer.json gives it id {found}"
    elif taken not in (None, token.content):
        why = f", which is {taken!r} in tokenizer.json"
    elif found is None and number != (free := max(backend.get_vocab().values()) + 1):
        why = f": the next free id is {free}"
    return why and f"the added token {token.content!r} can't have id {number}{why}"


def _named(folder: Path, config: Mapping[str, Any]) -> tuple[Names, dict[str, dict]]:
    """The special tokens by name, and for some of them, by text, the flags that a file gives."""
    flags: dict[str, dict] = {}

    def text(name: str, value: Any) -> str:
        if isinstance(value, Mapping):
            flags[str(value.get("content"))] = {k: bool(value[k]) for k in _FLAGS[:-1] if k in value}
            value = value.get("content")
        if not isinstance(value, str):
            raise ValueError(f"{folder}: {name} must be a string or an object with \"content\", got {value!r:.80}")
        return value

    extra = config.get("extra_special_tokens")
    of_model = extra if isinstance(extra, Mapping) else {}  # names that one model has, as {"image_token": "<image>"}
    singles = {**{name: config[name] for name in NAMES if config.get(name)}, **of_model}
    named: Names = {name: text(name, value) for name, value in singles.items()}
    for name in LISTS:
        if isinstance(values := config.get(name), list) and values:
            named[name] = [text(name, value) for value in values]
    return named, flags


def _stated(folder: Path, config: Mapping[str, Any], special: list[str]) -> Iterator[tuple[int, AddedToken]]:
    """(id, token) of each token whose id is stated outside of tokenizer.json, in the order of ids."""
    found: dict[int, AddedToken] = {}
    for content, number in _read(folder / "added_tokens.json").items():
        if not isinstance(number, int):
            raise ValueError(f"{folder}/added_tokens.json must map tokens to ids, got {content!r}: {number!r:.80}")
        found[number] = AddedToken(content, normalized=content not in special, special=content in special)
    decoder = config.get("added_tokens_decoder") or {}
    try:
        for number, entry in decoder.items():
            found[int(number)] = AddedToken(entry["content"], **{k: bool(entry[k]) for k in _FLAGS if k in entry})
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"{folder}/tokenizer_config.json: added_tokens_decoder must map ids to objects with \"content\" and flags, "
            f"got {decoder!r:.200}"
        ) from None
    yield from sorted(found.items())


def _read(path: Path) -> dict:
    """The object in a JSON file; {} if there is no such file. Raises ValueError if the file holds anything else."""
    return read_json(path) if path.is_file() else {}
