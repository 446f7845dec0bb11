"""Rounds as people and programs read them: what was drafted, with q and p, its fate, and the target's own token."""

import bisect
from collections.abc import Sequence
from typing import Any

from specjax.metrics import own_origin
from specjax.types import RoundInfo

GREEN, RED, BLUE, RESET = "\033[32m", "\033[9;31m", "\033[34m", "\033[0m"


def rounds_of(info: RoundInfo, tokenizer: Any | None) -> list[dict | None]:
    """One JSON-ready dict a row, of the keys of ``specjax.record.ROUND``; None for a row that committed nothing."""
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
                        "text": _text(tokenizer, info.draft[row, i]),
                        "q": float(info.q[row, i]),
                        "p": float(info.p[row, i]),
                        "accepted": i < accepted,
                    }
                    for i in range(drafted)
                ],
                "token": own,
                "text": None if own is None else _text(tokenizer, own),
                "kind": None if own is None else kind,
                **({"entropy": float(judged.mean())} if judged.any() else {}),
            }
        )
    return entries


def cut(rounds: Sequence[dict], end: int) -> list[dict]:
    """The rounds that gave a row's tokens before position ``end``; what lies past it counts as not accepted."""
    kept = list(rounds[: bisect.bisect_left(rounds, end, key=lambda entry: entry["position"])])
    if kept:  # only the last can reach past the end
        last, left = kept[-1], end - kept[-1]["position"]
        if sum(d["accepted"] for d in last["drafted"]) + (last["token"] is not None) > left:
            drafted = [{**d, "accepted": d["accepted"] and i < left} for i, d in enumerate(last["drafted"])]
            kept[-1] = {**last, "drafted": drafted, "token": None, "text": None, "kind": None}
    return kept


def _text(tokenizer: Any | None, token: Any) -> str:
    return str(int(token)) if tokenizer is None else tokenizer.decode([int(token)], skip_special_tokens=False)


def line(entry: dict, colour: bool) -> str:
    """One line of text for a round (specjax.record.ROUND)."""
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
