"""The record of a run as JSON. ``generate.py --json`` writes a record, and the report reads one.

The tables below are the schema. Each entry gives a key, its type, and its meaning. :func:`check` checks a record
against the tables, and checks that the parts of the record agree with each other. Times are in seconds. Probabilities
are those after all sampling transforms.
"""

import json
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from specjax.generation.metrics import Metrics
from specjax.generation.prompts import listed
from specjax.generation.result import Result
from specjax.generation.trace import text_of
from specjax.models import attention
from specjax.text.text_stream import TextStream

FORMAT, VERSION = "specjax-run", 1  # the version rises when a key is removed or changes its meaning

NUMBER = (int, float)
OPTIONAL = type(None)  # if a key's types hold this, the key may be null or missing

RUN = {
    "format": str,  # FORMAT
    "version": int,  # VERSION
    "settings": dict,
    "environment": dict,
    "completions": list,  # one COMPLETION for each prompt
    "stop_tokens": (list, OPTIONAL),  # the tokens that end a row, each as {"token": id, "text": str}
    "date": (str, OPTIONAL),  # the date that the chat template was given, in ISO format; null: it asked for no date
    "timing": dict,
}
SETTINGS = {
    "model": str,  # as the user named the model
    "dtype": str,  # the dtype of activations, and of weights that aren't quantised
    "quantize": (str, OPTIONAL),  # how the target's weights are quantised; null: they are not
    "kv_dtype": (str, OPTIONAL),  # the dtype of the caches; null: dtype
    "devices": (int, OPTIONAL),  # the number of devices that share the target; null: one
    "drafter": dict,  # the drafter's "name", and its settings
    "verifier": str,
    "num_speculative_tokens": int,  # K; 0 is plain decoding
    "block_width": (int, OPTIONAL),  # tokens a row of every target call; null: the narrowest that serves
    "sampling": dict,  # temperature, top_k, ...: as the user gave them; null is off
    "max_new_tokens": (int, OPTIONAL),  # null: as many as the model's context holds
    "seed": int,  # the first prompt's seed; prompt i has seed + i, unless its completion has another one
}
ENVIRONMENT = {
    "device": str,
    "platform": str,  # cpu, gpu, ...
    "cpu": str,
    "cpu_count": int,
    "attention": (str, OPTIONAL),  # what serves the few tokens of decoding: mosaic, triton or xla; null: not recorded
    "jax": str,
    "specjax": str,
    "python": str,
    # Settings of the whole process that the numbers depend on. Older records lack these keys.
    "matmul_precision": (str, OPTIONAL),  # jax_default_matmul_precision; null: the device's default
    "x64": (bool, OPTIONAL),  # jax_enable_x64
    "prng": (str, OPTIONAL),  # jax_default_prng_impl; requests use threefry2x32 keys whatever this setting is
}
PROCESS_WIDE = {  # keys of ENVIRONMENT and the settings of JAX that they hold
    "matmul_precision": "jax_default_matmul_precision",
    "x64": "jax_enable_x64",
    "prng": "jax_default_prng_impl",
}
COMPLETION = {
    "prompt": str,  # the prompt as the user wrote it; a conversation is written as JSON
    "prompt_tokens": int,  # the number of prompt tokens
    "prompt_token_ids": list,
    "seed": (int, OPTIONAL),
    "text": (str, OPTIONAL),  # the text of the new tokens; null: the model has no tokenizer
    "tokens": list,  # the ids of the new tokens, a stop token included
    "pieces": (list, OPTIONAL),  # the text that each token adds; "" inside a character and for special tokens
    "origins": list,  # the origin of each token: "accepted", "correction", "bonus" or "plain" (Metrics.origins)
    "logprobs": (list, OPTIONAL),  # each token's log-probability under the model's raw logits; null: not asked for
    "top_logprobs": (list, OPTIONAL),  # the likeliest tokens at each position, as [id, log-probability] pairs
    "finish_reason": (str, OPTIONAL),  # "stop" or "length"; null: the stream was left early
    "metrics": dict,  # Metrics.to_dict
    "rounds": (list, OPTIONAL),  # one ROUND for each step; null: the run was not streamed
}
ROUND = {
    "position": int,  # the position of the round's first new token; position 0 is the first prompt token
    "drafted": list,  # the DRAFTED tokens in order
    "token": (int, OPTIONAL),  # the target's own token; null: the end of the row cut this token off
    "text": (str, OPTIONAL),  # the text of the target's own token
    "kind": (str, OPTIONAL),  # the kind of the target's own token: "correction", "bonus" or "plain"
    "entropy": (*NUMBER, OPTIONAL),  # the mean entropy of q over log V at judged tokens, 0 to 1; not for point masses
}
DRAFTED = {
    "token": int,
    "text": str,
    "q": NUMBER,  # the draft's probability of the token; 1 for a point mass
    "p": NUMBER,  # the target's probability of the token
    "accepted": bool,  # whether the token was accepted and kept
}
TIMING = {
    "prefill": NUMBER,
    "decode": NUMBER,  # the seconds of all rounds, without compilation
    "tokens_per_second": NUMBER,  # the new tokens of all prompts over decode
    "streamed": bool,  # true: Python called each round; false: the whole loop ran on the device
    "plain": (dict, OPTIONAL),  # prefill, decode and tokens_per_second of plain decoding in the same process
    "ratio": (*NUMBER, OPTIONAL),  # tokens_per_second over that of plain decoding
    "identical": (bool, OPTIONAL),  # whether plain decoding gave the same tokens
    "calls": (dict, OPTIONAL),  # CALLS, from specjax.timing.calls
}
CALLS = {
    "plain_step": NUMBER,  # the seconds of a round of plain decoding
    "draft": NUMBER,  # the seconds of drafting K tokens
    "verify": dict,  # the seconds of the rest of a round, by the block's width in tokens ("1" to K + 1)
}


def run(
    result: Result,
    prompts: str | Sequence,
    settings: dict[str, Any],
    timing: dict[str, Any],
    tokenizer: Any | None,
    rounds: Sequence[Sequence[dict]] | None = None,
) -> dict[str, Any]:
    """The checked record of a run.

    Args:
      result: the result of ``generate`` or of ``Stream.result``.
      prompts: the prompts as the user wrote them.
      settings: a dict with the keys of SETTINGS.
      timing: a dict with the keys of TIMING.
      tokenizer: the target's tokenizer, or None.
      rounds: ``Stream.trace``, or None if the run was not streamed.

    Raises:
      ValueError: the parts contradict each other.
    """
    completions = []
    for i, prompt in enumerate(listed(prompts)):
        completion = _completion(result, i, prompt, tokenizer)
        completions.append({**completion, "rounds": None if rounds is None else list(rounds[i])})
    record = {
        "format": FORMAT,
        "version": VERSION,
        "settings": settings,
        "environment": environment(),
        "completions": completions,
        "stop_tokens": [{"token": i, "text": text_of(tokenizer, i)} for i in result.stop_token_ids],
        "date": result.date,
        "timing": timing,
    }
    check(record)
    return record


def _completion(result: Result, i: int, prompt: Any, tokenizer: Any | None) -> dict[str, Any]:
    """The part of a record that tells of prompt ``i``, without its rounds."""
    tokens, best = result.tokens[i], result.top_logprobs
    return {
        "prompt": prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False),
        "prompt_tokens": len(result.prompt_tokens[i]),
        "prompt_token_ids": result.prompt_tokens[i],
        "seed": result.seeds[i] if result.seeds else None,
        "text": result.texts[i] if result.texts else None,
        "tokens": tokens,
        "pieces": None if tokenizer is None else pieces_of(tokenizer, tokens),
        "origins": result.metrics[i].origins(),
        "logprobs": None if result.logprobs is None else result.logprobs[i],
        "top_logprobs": None if best is None else [[list(pair) for pair in pairs] for pairs in best[i]],
        "finish_reason": result.finish_reasons[i],
        "metrics": result.metrics[i].to_dict(),
    }


def pieces_of(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds. The pieces together are the whole text."""
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokens]
    if pieces:
        pieces[-1] += stream.flush()
    return pieces


def environment() -> dict[str, Any]:
    """The environment of this process, with the keys of ENVIRONMENT."""
    import specjax

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count() or 1,
        "attention": attention.usual_implementation(),
        "jax": jax.__version__,
        "specjax": specjax.__version__,
        "python": platform.python_version(),
        **{name: getattr(jax.config, setting) for name, setting in PROCESS_WIDE.items()},
    }


def _cpu_name() -> str:
    """The model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def load(path: str | Path) -> dict[str, Any]:
    """The checked record of a JSON file.

    Raises:
      OSError: the file can't be read.
      ValueError: the file is no JSON file, or no record. The message says what is wrong.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path} is not a JSON file: {problem}") from problem
    try:
        check(record)
    except ValueError as problem:
        raise ValueError(f"{path} is not a usable record of a run: {problem}") from problem
    return record


def check(record: Any) -> None:
    """Raises ValueError unless the record is complete and consistent. The message names the place and the fault."""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f'"format" must be "{FORMAT}"; write one with scripts/generate.py --json FILE')
    if record.get("version") != VERSION:
        raise ValueError(
            f"the record's version is {record.get('version')!r}, and this specjax reads version {VERSION}; write the "
            "record again with scripts/generate.py --json FILE"
        )
    _keys("the record", record, RUN)
    _keys("settings", record["settings"], SETTINGS)
    _keys("settings.drafter", record["settings"]["drafter"], {"name": str})
    _keys("environment", record["environment"], ENVIRONMENT)
    for i, completion in enumerate(record["completions"]):
        _check_completion(f"completions[{i}]", completion, record["settings"]["num_speculative_tokens"])
    _check_timing(record)


def _check_completion(where: str, completion: Any, size: int) -> None:
    _keys(where, completion, COMPLETION)
    try:
        metrics = Metrics.from_dict(completion["metrics"])
    except (ValueError, TypeError) as problem:
        raise ValueError(f"{where}.metrics: {problem}") from problem
    tokens, pieces = completion["tokens"], completion.get("pieces")
    _same(f"{where}: tokens, and completion_tokens of its metrics", len(tokens), metrics.completion_tokens)
    _same(f"{where}: num_speculative_tokens, and that of the settings", metrics.num_speculative_tokens, size)
    _same(f"{where}: origins, and those that the steps give", completion["origins"], metrics.origins())
    if pieces is not None:
        _same(f"{where}: pieces, and tokens", len(pieces), len(tokens))
        _same(f"{where}: text, and its pieces", completion.get("text"), "".join(pieces))
    for name in ("logprobs", "top_logprobs"):
        if completion.get(name) is not None:
            _same(f"{where}: {name}, and tokens", len(completion[name]), len(tokens))
    if completion.get("rounds") is not None:
        _check_rounds(f"{where}.rounds", completion, metrics)


def _check_rounds(where: str, completion: dict, metrics: Metrics) -> None:
    rounds, position = completion["rounds"], completion["prompt_tokens"]
    _same(f"{where}, and steps of the metrics", len(rounds), metrics.num_steps)
    rebuilt: list[int] = []
    for i, entry in enumerate(rounds):
        _keys(f"{where}[{i}]", entry, ROUND)
        fates = []
        for j, token in enumerate(entry["drafted"]):
            _keys(f"{where}[{i}].drafted[{j}]", token, DRAFTED)
            if not (0 <= token["p"] <= 1 and 0 <= token["q"] <= 1):
                raise ValueError(f"{where}[{i}].drafted[{j}]: q and p must lie in [0, 1]")
            fates.append(token["accepted"])
        accepted = sum(fates)
        _same(f"{where}[{i}]: accepted tokens, and the first of the draft", fates, sorted(fates, reverse=True))
        _same(f"{where}[{i}]: drafted, and per_step_drafted", len(fates), metrics.per_step_drafted[i])
        _same(f"{where}[{i}]: accepted, and per_step_accepted", accepted, metrics.per_step_accepted[i])
        _same(f"{where}[{i}]: position, and tokens before it", entry["position"], position + len(rebuilt))
        rebuilt += [token["token"] for token in entry["drafted"][:accepted]]
        if entry.get("token") is not None:
            kind = completion["origins"][len(rebuilt)] if len(rebuilt) < len(completion["origins"]) else None
            _same(f"{where}[{i}]: kind, and the token's origin", entry.get("kind"), kind)
            rebuilt.append(entry["token"])
    _same(f"{where}: what they commit, and tokens", rebuilt, completion["tokens"])


def _check_timing(record: dict) -> None:
    timing = record["timing"]
    _keys("timing", timing, TIMING)
    tokens = sum(len(completion["tokens"]) for completion in record["completions"])
    for where, part in [("timing", timing), ("timing.plain", timing.get("plain"))]:
        if part is not None:
            _keys(where, part, {name: TIMING[name] for name in ("prefill", "decode", "tokens_per_second")})
    if timing["decode"] > 0:
        _close("timing.tokens_per_second", timing["tokens_per_second"], tokens / timing["decode"])
    if timing.get("ratio") is not None:
        _keys("timing", timing, {"plain": dict})
        _close("timing.ratio", timing["ratio"], timing["tokens_per_second"] / timing["plain"]["tokens_per_second"])
    if timing.get("calls") is not None:
        calls, size = timing["calls"], record["settings"]["num_speculative_tokens"]
        _keys("timing.calls", calls, CALLS)
        _keys("timing.calls.verify", calls["verify"], {name: NUMBER for name in calls["verify"]})
        widest = max((int(w) if w.isdecimal() else 0 for w in calls["verify"]), default=0)
        if widest <= size:
            raise ValueError(f"timing.calls.verify: the widest block has {widest} tokens, but K + 1 is {size + 1}")


def _keys(where: str, value: Any, table: dict[str, Any]) -> None:
    """Checks a dict against the keys and types of one table. Numbers must be finite and not negative.

    Further keys are allowed.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {value!r:.80}")
    for key, types in table.items():
        types = types if isinstance(types, tuple) else (types,)
        if key not in value and OPTIONAL not in types:
            raise ValueError(f"{where} lacks {key!r}")
        found = value.get(key)
        names = [t.__name__ for t in types if t is not OPTIONAL]
        if not isinstance(found, types) or (isinstance(found, bool) and bool not in types):
            raise ValueError(f"{where}: {key!r} must be of type {' or '.join(names)}, got {found!r:.80}")
        if isinstance(found, NUMBER) and not 0 <= found < math.inf:
            raise ValueError(f"{where}: {key!r} must be a finite number >= 0, got {found!r}")


def _same(names: str, one: Any, other: Any) -> None:
    """Raises ValueError unless two parts of the record are equal. ``names`` names both."""
    if one != other:
        raise ValueError(f"{names}, differ: {one!r:.80} and {other!r:.80}")


def _close(name: str, one: float, other: float) -> None:
    """Raises ValueError unless a figure of the record is equal to the figure that follows from other parts."""
    if not math.isclose(one, other, rel_tol=1e-6):
        raise ValueError(f"{name} is {one}, but the times and tokens give {other}")
