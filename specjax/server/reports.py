"""The report pages of the last answers, which :mod:`specjax.report` draws from their records."""

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

from specjax.engine.engine import Engine
from specjax.generation.result import Result
from specjax.models.quantized import kind_of
from specjax.server.work import Work
from specjax.verify import VERIFIERS

MOST = 32  # answers that are kept


class Kept(NamedTuple):
    """An answer, from which a report can be made once it has ended."""

    # The model's name.
    model: str
    engine: Engine
    work: Work
    # The answer's results, None until a choice has ended.
    results: list[Result | None]


class Reports:
    """The last answers of one choice whose clients asked for origins, by the ids of the answers.

    Whoever knows an answer's id may read its report: a browser follows a link without a key, and ids are random.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._keeping = threading.Lock()
        self._drawing = threading.Lock()  # the style of matplotlib is one for the whole process

    def keep(self, answer_id: str, kept: Kept) -> None:
        """Keeps an answer that has begun, and forgets the oldest of too many. Any thread may call this."""
        with self._keeping:
            self._kept[answer_id] = kept
            while len(self._kept) > MOST:
                self._kept.popitem(last=False)

    def page(self, answer_id: str) -> str | None:
        """The page of an answer. None: the answer is unknown, or has not come to its end. Takes a second or so."""
        from specjax import report  # imported here, because the charts' library takes a second

        kept = self._kept.get(answer_id)
        if kept is None or kept.results[0] is None:
            return None
        with self._drawing:
            return report.page(_record(kept, kept.results[0]))


def _record(kept: Kept, result: Result) -> dict[str, Any]:
    """The record of an answer, as ``scripts/generate.py --json`` writes one."""
    from specjax.report import record

    lm, work, decoder = kept.engine.lm, kept.work, kept.engine.decoder
    assert lm.tokenizer is not None
    sampling = {name: value for name, value in work.options.items() if name not in ("logprobs", "max_new_tokens")}
    settings = {
        "model": kept.model,
        "dtype": lm.dtype.name,
        "quantize": kind_of(lm.params),
        "kv_dtype": lm.kv_dtype,
        "devices": 1 if lm.mesh is None else lm.mesh.size,
        "drafter": {"name": type(decoder.drafter).__name__},
        "verifier": next(name for name, verifier in VERIFIERS.items() if type(verifier) is type(decoder.verifier)),
        "num_speculative_tokens": decoder.num_speculative_tokens,
        "block_width": decoder.block_width,
        "sampling": sampling,
        "max_new_tokens": work.options["max_new_tokens"],
        "seed": work.seed,
    }
    decode = result.seconds["decode"]
    times = {**result.seconds, "tokens_per_second": len(result.tokens[0]) / decode if decode else 0.0, "streamed": True}
    prompt = lm.tokenizer.decode(work.prompts[0], skip_special_tokens=False)
    return record.run(result, [prompt], settings, times, lm.tokenizer)
