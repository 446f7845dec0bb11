"""Rounds in a form that people and programs can read.

Each round says which tokens were drafted, their q and p, which of them were accepted, and the target's own token.
"""

import bisect
from collections.abc import Sequence
from typing import Any

from specjax.decode.types import RoundInfo
from specjax.generation.metrics import own_origin

GREEN, RED, BLUE, RESET = "\033[32m", "\033[9;31m", "\033[34m", "\033[0m"


def rounds_of(info: RoundInfo, tokenizer: Any | None) -> list[dict | None]:
    """For each row, a dict that JSON can hold, with the keys of ``specjax.record.ROUND``. None: no token committed.

    Args:
      info: the round, in NumPy arrays.
      tokenizer: the target's tokenizer; None: the text of a token is its id.
    """
    entries: list[dict | None] = []
    for row, committed in enumerate(info.committed.tolist()):
        if not committed:
            entries.append(None)
            continue
        drafted, accepted = int(info.drafted[row]), int(info.accepted[row])
        own = int(info.tokens[row, accepted]) if committed > accepted else None
        kind = own_origin(accepted, drafted)
        judged = info.entropy[row, : min(accepted + 1, drafted)]
        entries.append(
            {
                "position": int(info.starts[row]),
                "drafted": [
                    {
                        "token": int(info.draft[row, i]),
                        "text": text_of(tokenizer, info.draft[row, i]),
                        "q": float(info.q[row, i]),
                        "p": float(info.p[row, i]),
                        "accepted": i < accepted,
                    }
                    for i in range(drafted)
                ],
                "token": own,
                "text": None if own is None else text_of(tokenizer, own),
                "kind": None if own is None else kind,
                **({"entropy": float(judged.mean())} if judged.any() else {}),
            }
        )
    return entries


def cut(rounds: Sequence[dict], end: int) -> list[dict]:
    """The rounds of a row up to position ``end``.

    Rounds that start at ``end`` or later are left out. If the last round reaches past ``end``, its drafted tokens from
    ``end`` on count as not accepted, and its own token is removed.
    """
    kept = list(rounds[: bisect.bisect_left(rounds, end, key=lambda entry: entry["position"])])
    if kept:  # only the last can reach past the end
        last, left = kept[-1], end - kept[-1]["position"]
        if sum(d["accepted"] for d in last["drafted"]) + (last["token"] is not None) > left:
            drafted = [{**d, "accepted": d["accepted"] and i < left} for i, d in enumerate(last["drafted"])]
            kept[-1] = {**last, "drafted": drafted, "token": None, "text": None, "kind": None}
    return kept


def text_of(tokenizer: Any | None, token: Any) -> str:
    """The text of a token, special tokens included. Without a tokenizer: the token's id."""
    return str(int(token)) if tokenizer is None else tokenizer.decode([int(token)], skip_special_tokens=False)


def line(entry: dict, colour: bool) -> str:
    """One line of text for a round, a dict with the keys of ``specjax.record.ROUND``.

    With ``colour``, terminal colours say which drafted tokens were accepted; without, words do.
    """
    parts = []
    for draft in entry["drafted"]:
        fate = "accepted" if draft["accepted"] else "rejected"
        shade = GREEN if draft["accepted"] else RED
        text = f"{shade}{draft['text']!r}{RESET}" if colour else f"{draft['text']!r}"
        parts.append(f"{text} q={draft['q']:.2f} p={draft['p']:.2f}" + ("" if colour else f" {fate}"))
    if entry["kind"]:
        text = f"{BLUE}{entry['text']!r}{RESET}" if colour else f"{entry['text']!r}"
        parts.append(f"{entry['kind']} {text}")
    return f"{entry['position']:>5}: " + "; ".join(parts)
