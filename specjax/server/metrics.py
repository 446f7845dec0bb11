"""What GET /metrics says. Names and meanings are vLLM's, with "specjax:" in front."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specjax.engine.stats import Stats

if TYPE_CHECKING:
    from specjax.server.service import Service

PREFIX = "specjax:"
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)


LABEL = "model_name"  # of every metric: the name that stands in the answers of an engine


class Times:
    """The measured times of requests, in seconds.

    Args:
      models: the values of the label ``model_name``. Each is shown from the start, with a count of 0.
    """

    def __init__(self, models: Iterable[str]) -> None:
        self._models = list(models)
        self.registry = CollectorRegistry()
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _LONG
        )
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request. The tokens of one round come together.",
            (0.0001, *_SHORT),
        )  # fmt: skip
        self.whole = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last token.", _LONG
        )
        self.queue = self._histogram("request_queue_time_seconds", "From a request's arrival to its admission.", _LONG)

    def _histogram(self, name: str, help: str, buckets: Iterable[float]) -> Histogram:
        made = Histogram(PREFIX + name, help, (LABEL,), registry=self.registry, buckets=tuple(buckets))
        for model in self._models:
            made.labels(model)
        return made


class _OfEngines(Collector):
    """The engines' own counts, read when they are asked for."""

    def __init__(self, service: "Service"):
        self._service = service

    def describe(self) -> Iterable[Metric]:
        """Nothing: else the registry would ask for all values when this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        assert self._service.engine
        for name, engine in self._service.engines.items():
            for family in _families(name, engine.stats(), self._service.before[name]):
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()


def _families(model: str, now: Stats, before: Stats) -> Iterator[Metric]:
    """The metrics of one engine: what it holds now, and what it has done since ``before``."""
    used = 1 - now.free_kv_tokens / now.kv_tokens
    for name, help, level in (
        ("num_requests_running", "Requests that have a slot.", now.running),
        ("num_requests_waiting", "Requests that wait for a slot.", now.waiting),
        ("kv_cache_usage_perc", "The share of the cache's pages that requests hold; 1 is all.", used),
    ):
        gauge = GaugeMetricFamily(PREFIX + name, help, labels=[LABEL])
        gauge.add_metric([model], level)
        yield gauge
    for name, help, field in (
        ("prompt_tokens", "Tokens of admitted prompts.", "prompt_tokens"),
        ("generation_tokens", "New tokens.", "completion_tokens"),
        ("prefix_cache_queries", "Prompt tokens that were looked for in the prefix cache.", "prompt_tokens"),
        ("prefix_cache_hits", "Prompt tokens that were found in the prefix cache.", "cached_tokens"),
        ("num_preemptions", "How many times a request was swapped out.", "swaps"),
        ("spec_decode_num_drafts", "Rounds of a request that verified a draft.", "spec_steps"),
        ("spec_decode_num_draft_tokens", "Drafted tokens that were verified.", "drafted"),
        ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", "accepted"),
    ):
        count = CounterMetricFamily(PREFIX + name, help, labels=[LABEL])
        count.add_metric([model], getattr(now, field) - getattr(before, field))
        yield count
    name = PREFIX + "spec_decode_num_accepted_tokens_per_pos"
    places = CounterMetricFamily(name, "Accepted tokens, by place in the draft.", labels=[LABEL, "position"])
    for place, number in enumerate(now.accepted_per_position):
        earlier = before.accepted_per_position[place : place + 1]
        places.add_metric([model, str(place)], number - sum(earlier))
    yield places
    ends = CounterMetricFamily(PREFIX + "request_success", "Requests that ended.", labels=[LABEL, "finished_reason"])
    for reason in sorted({"stop", "length", "abort", "error", *now.finished}):
        ends.add_metric([model, reason], now.finished.get(reason, 0) - before.finished.get(reason, 0))
    yield ends


def text_of(service: "Service") -> bytes:
    """All metrics in Prometheus's text format. Waits for the engine's thread, for a round at most."""
    registry = CollectorRegistry()
    registry.register(_OfEngines(service))
    return generate_latest(registry) + generate_latest(service.times.registry)
