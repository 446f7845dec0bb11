"""The record of a run as JSON: what ``generate.py --json`` writes, ``Stream.trace`` holds parts of, the report reads.

The tables below are the schema: key, type, meaning. :func:`check` holds a record to them and to the identities between
its parts. Times are seconds, probabilities are those after all sampling transforms.
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
from specjax.text.text_stream import TextStream

FORMAT, VERSION = "specjax-run", 1  # the version rises when a key goes or changes its meaning

NUMBER = (int, float)
OPTIONAL = type(None)  # among a key's types: the key may be null or missing

RUN = {
    "format": str,  # FORMAT
    "version": int,  # VERSION
    "settings": dict,
    "environment": dict,
    "completions": list,  # one a prompt
    "stop_tokens": (list, OPTIONAL),  # of {"token": id, "text": str}: rows end there
    "date": (str, OPTIONAL),  # that the chat template was told, in ISO format; null: it asked for none
    "timing": dict,
}
SETTINGS = {
    "model": str,
    "dtype": str,  # of weights that aren't quantised, and of activations
    "quantize": (str, OPTIONAL),  # of the target's weights; null: none
    "kv_dtype": (str, OPTIONAL),  # of the caches; null: dtype
    "devices": (int, OPTIONAL),  # that share the target; null: one
    "drafter": dict,  # its "name", and what it was set to
    "verifier": str,
    "num_speculative_tokens": int,  # K; 0 is plain decoding
    "sampling": dict,  # temperature, top_k, ...: as asked for; null is off
    "max_new_tokens": (int, OPTIONAL),  # null: up to the context
    "seed": int,  # of the first prompt; unless its completion says otherwise, prompt i has seed + i
}
ENVIRONMENT = {
    "device": str,
    "platform": str,  # cpu, gpu, ...
    "cpu": str,
    "cpu_count": int,
    "jax": str,
    "specjax": str,
    "python": str,
    # Settings of the whole process that numbers depend on; records before them lack them.
    "matmul_precision": (str, OPTIONAL),  # jax_default_matmul_precision; null: the device's default
    "x64": (bool, OPTIONAL),  # jax_enable_x64
    "prng": (str, OPTIONAL),  # jax_default_prng_impl; requests' keys are threefry2x32 whatever it is
}
PROCESS_WIDE = {  # key of ENVIRONMENT -> setting of JAX
    "matmul_precision": "jax_default_matmul_precision",
    "x64": "jax_enable_x64",
    "prng": "jax_default_prng_impl",
}
COMPLETION = {
    "prompt": str,  # a conversation in JSON
    "prompt_tokens": int,  # how many
    "prompt_token_ids": list,
    "seed": (int, OPTIONAL),
    "text": (str, OPTIONAL),  # null: the model has no tokenizer
    "tokens": list,  # ids of the new tokens, a stop token included
    "pieces": (list, OPTIONAL),  # what each token adds to the text; "" inside a character and for special tokens
    "origins": list,  # of each token: "accepted", "correction", "bonus" or "plain" (Metrics.origins)
    "logprobs": (list, OPTIONAL),  # of each token, natural log under the model's raw logits; null: not asked for
    "top_logprobs": (list, OPTIONAL),  # for each token the likeliest ones there, [id, log-probability] pairs
    "finish_reason": (str, OPTIONAL),  # null: left early
    "metrics": dict,  # Metrics.to_dict
    "rounds": (list, OPTIONAL),  # known if the run was streamed; one of ROUND a step
}
ROUND = {
    "position": int,  # of the round's first token in prompt and output
    "drafted": list,  # of DRAFTED, in order
    "token": (int, OPTIONAL),  # the target's own; null if the end cut it off
    "text": (str, OPTIONAL),
    "kind": (str, OPTIONAL),  # "correction", "bonus" or "plain"
    "entropy": (*NUMBER, OPTIONAL),  # of q over log V, mean over judged tokens, from 0 to 1; absent for point masses
}
DRAFTED = {
    "token": int,
    "text": str,
    "q": NUMBER,  # the draft's probability, 1 for a point mass
    "p": NUMBER,  # the target's
    "accepted": bool,  # and kept
}
TIMING = {
    "prefill": NUMBER,
    "decode": NUMBER,  # all rounds, without compilation
    "tokens_per_second": NUMBER,  # new tokens of all prompts by decode
    "streamed": bool,  # rounds called from Python and shown one by one, or a loop on the device
    "plain": (dict, OPTIONAL),  # prefill, decode, tokens_per_second of plain decoding in the same process
    "ratio": (*NUMBER, OPTIONAL),  # tokens_per_second by that of plain
    "identical": (bool, OPTIONAL),  # the two gave the same tokens
    "calls": (dict, OPTIONAL),  # specjax.timing.calls
}
CALLS = {
    "plain_step": NUMBER,  # a round of plain decoding
    "draft": NUMBER,  # drafting K tokens
    "verify": dict,  # all else in a round, by the block's width in tokens ("1" to K + 1)
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
      result: of ``generate`` or ``Stream.result``.
      prompts: as the user wrote them.
      settings: SETTINGS.
      timing: TIMING.
      tokenizer: the target's, or None.
      rounds: ``Stream.trace``, or None if it wasn't streamed.

    Raises:
      ValueError: if the parts contradict each other.
    """
    completions, best = [], result.top_logprobs
    for i, prompt in enumerate(listed(prompts)):
        tokens, text = result.tokens[i], result.texts[i] if result.texts else None
        completion = {
            "prompt": prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False),
            "prompt_tokens": len(result.prompt_tokens[i]),
            "prompt_token_ids": result.prompt_tokens[i],
            "seed": result.seeds[i] if result.seeds else None,
            "text": text,
            "tokens": tokens,
            "pieces": None if tokenizer is None else pieces_of(tokenizer, tokens),
            "origins": result.metrics[i].origins(),
            "logprobs": None if result.logprobs is None else result.logprobs[i],
            "top_logprobs": None if best is None else [[list(pair) for pair in pairs] for pairs in best[i]],
            "finish_reason": result.finish_reasons[i],
            "metrics": result.metrics[i].to_dict(),
            "rounds": None if rounds is None else list(rounds[i]),
        }
        completions.append(completion)
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


def pieces_of(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokens]
    if pieces:
        pieces[-1] += stream.flush()
    return pieces


def environment() -> dict[str, Any]:
    """ENVIRONMENT of this process."""
    import specjax

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count() or 1,
        "jax": jax.__version__,
        "specjax": specjax.__version__,
        "python": platform.python_version(),
        **{name: getattr(jax.config, setting) for name, setting in PROCESS_WIDE.items()},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def load(path: str | Path) -> dict[str, Any]:
    """A record from a JSON file, checked.

    Raises:
      OSError: the file can't be read.
      ValueError: it is no JSON, or no record, naming what is wrong.
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
    """Raises ValueError, naming the place and what is wrong there, unless the record is whole and consistent."""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f'"format" must be "{FORMAT}"; write one with scripts/generate.py --json FILE')
    if record.get("version") != VERSION:
        raise ValueError(f"its version is {record.get('version')!r}, and this specjax reads version {VERSION}")
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
    """The keys and types of one table; more keys are allowed, numbers are finite and not negative."""
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


def _same(what: str, one: Any, other: Any) -> None:
    if one != other:
        raise ValueError(f"{what}, differ: {one!r:.80} and {other!r:.80}")


def _close(what: str, one: float, other: float) -> None:
    if not math.isclose(one, other, rel_tol=1e-6):
        raise ValueError(f"{what} is {one}, but the times and tokens give {other}")
