"""What a client saw of its requests, and the figures that follow."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass
class Seen:
    """One request, as its client saw the request. Times are those of ``time.perf_counter``, in seconds."""

    # When the request was sent.
    began: float
    # When new text came. The tokens of one round come together.
    arrivals: list[float]
    # The number of the prompt's tokens, and of new ones.
    prompt_tokens: int
    new_tokens: int
    # The new text.
    text: str
    # Why the request has failed. None: it has not.
    error: str | None = None


def figures(seen: list[Seen], seconds: float) -> dict[str, Any]:
    """The figures of a run.

    Args:
      seen: all requests of the run.
      seconds: from the first request's start to the last one's end.

    Returns:
      Counts, throughputs a second, and for each of these times the mean, the median and the 99th percentile in
      milliseconds: "ttft", from sending to the first text; "tpot", the time of a token after the first text; "itl",
      between two arrivals of text; "e2el", from sending to the last text. Failed requests are only counted.

    Raises:
      ValueError: every request has failed.
    """
    done = [one for one in seen if one.error is None and one.arrivals]
    if not done:
        raise ValueError(f"every request has failed; the first one said: {seen[0].error or 'no text'}")
    times = {
        "ttft": [one.arrivals[0] - one.began for one in done],
        "tpot": [(one.arrivals[-1] - one.arrivals[0]) / (one.new_tokens - 1) for one in done if one.new_tokens > 1],
        "itl": [gap for one in done for gap in np.diff(one.arrivals)],
        "e2el": [one.arrivals[-1] - one.began for one in done],
    }
    prompt, new = sum(one.prompt_tokens for one in done), sum(one.new_tokens for one in done)
    found: dict[str, Any] = {
        "completed": len(done),
        "failed": len(seen) - len(done),
        "duration": seconds,
        "total_input_tokens": prompt,
        "total_output_tokens": new,
        "request_throughput": len(done) / seconds,
        "output_throughput": new / seconds,
        "total_token_throughput": (prompt + new) / seconds,
    }
    for name, values in times.items():
        in_ms = np.array(values or [0.0]) * 1e3  # a request of one token has no time between tokens
        parts = {"mean": in_ms.mean(), "median": np.median(in_ms), "p99": np.percentile(in_ms, 99)}
        found |= {f"{part}_{name}_ms": float(value) for part, value in parts.items()}
    return found
