"""Turns prompts as users write them into token ids, with every check."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax.decode.numeric import are_ints, is_int
from specjax.models.lm import LM
from specjax.text.chat import is_conversation


def on_host(prompts: Any) -> Any:
    """The same prompts, with Python lists and numbers in place of JAX arrays and of single numbers in arrays."""
    if isinstance(prompts, jax.Array) or (isinstance(prompts, np.ndarray) and prompts.ndim == 0):
        return np.asarray(prompts).tolist()
    if not isinstance(prompts, list | tuple) or are_ints(prompts):
        return prompts
    return [on_host(prompt) for prompt in prompts]


def listed(prompts: Any) -> list:
    """One prompt or several prompts as a list. Raises ValueError if there is no prompt."""
    if isinstance(prompts, str) or is_conversation(prompts):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray) or len(prompts) == 0:
        raise ValueError(
            "prompts must be a string, a conversation (a list of messages), or a list of strings, conversations or "
            f"token-id lists, got {prompts!r}"
        )
    return list(prompts)


def encode_prompts(
    lm: LM,
    prompts: Any,
    chat: bool,
    parse_special: bool | None = None,
    tools: Sequence[Any] | None = None,
    date: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[list[int]]:
    """The token ids of each prompt.

    Args:
      lm: the target model. If it has an encoder, the prompts are sources, and the decoder's first token follows each.
      prompts: as in :func:`specjax.prepare`.
      chat, parse_special, tools, date, chat_template_kwargs: as in :class:`Options`.

    Raises:
      ValueError: one of these holds.
        - There is no prompt, or a prompt is empty.
        - A prompt is neither a string, nor a conversation, nor a list of token ids.
        - A token id is outside the vocabulary, or a prompt is longer than the model's context.
        - A prompt is text, and the model has no tokenizer, or the text is not valid Unicode.
        - ``chat`` is set, and a prompt is a list of token ids.
        - An argument for the chat template is given, and no prompt uses the chat template.
    """
    if parse_special is not None and not isinstance(parse_special, bool):
        raise ValueError(f"parse_special must be True, False or None, got {parse_special!r}")
    prompts = listed(prompts)
    template = {"tools": tools, "date": date, "chat_template_kwargs": chat_template_kwargs}
    template = {name: value for name, value in template.items() if value is not None}
    if template and not (chat or any(map(is_conversation, prompts))):
        raise ValueError(f"{', '.join(template)} is for the chat template; pass chat=True, or conversations as prompts")
    encoded = []
    for row, prompt in enumerate(prompts):
        if isinstance(prompt, str) or is_conversation(prompt):
            ids = _text_ids(lm, row, prompt, chat or not isinstance(prompt, str), parse_special, template)
        elif isinstance(prompt, Sequence | np.ndarray) and are_ints(prompt):
            if chat:
                raise ValueError(f"chat=True needs text prompts, but prompt {row} is a list of token ids")
            ids = list(map(int, prompt))
        else:
            raise ValueError(
                f"prompt {row} must be a string, a conversation or a list of token ids, got {prompt!r}"
                + ("; for one prompt of token ids pass [[...]]" if is_int(prompt) else "")
            )
        ids = [*ids, *lm.config.start_ids] if ids else ids
        _check_ids(lm, row, ids)
        encoded.append(ids)
    return encoded


def _text_ids(lm: LM, row: int, prompt: Any, chat: bool, parse_special: bool | None, template: dict) -> list[int]:
    """The token ids of a text or a conversation. Raises ValueError, which names the prompt."""
    if lm.tokenizer is None:
        raise ValueError(f"prompt {row} is text, but the model has no tokenizer; pass token ids")
    if not prompt:
        raise ValueError(
            f"prompt {row} is empty; to start from a BOS token alone, pass a list that holds its id: [[bos_token_id]]"
        )
    switch = {} if parse_special in (None, not chat) else {"parse_special": parse_special}
    ends = {"with_eos": True} if lm.has_encoder else {}
    try:
        return (
            lm.tokenizer.apply_chat_template(prompt, **template, **switch)
            if chat
            else lm.tokenizer.encode(prompt, **switch, **ends)
        )
    except ValueError as e:
        raise ValueError(f"prompt {row}: {e}") from e


def _check_ids(lm: LM, row: int, ids: list[int]) -> None:
    """Raises ValueError if a prompt is empty, longer than the model's context, or has an id outside the vocabulary."""
    if not ids:
        raise ValueError(f"prompt {row} is empty; give at least one token")
    if min(ids) < 0 or max(ids) >= lm.vocab_size:
        outside = next(token for token in ids if not 0 <= token < lm.vocab_size)
        text = "" if lm.tokenizer is None else f" ({lm.tokenizer.token_str(outside)!r})"
        raise ValueError(
            f"prompt {row} has token id {outside}{text}, outside the model's vocabulary of {lm.vocab_size}"
        )
    if len(ids) > lm.max_positions:
        raise ValueError(
            f"prompt {row} has {len(ids)} tokens, more than the model's context of {lm.max_positions}; shorten it"
        )
