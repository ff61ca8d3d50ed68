"""Prometheus metrics under vLLM's names, so that its dashboards and `vllm bench serve` read this server unchanged.

Counters of the engine are read from the runtime's snapshot at scrape time; latencies are observed as outputs arrive.
Definitions: a draft is one verify that had drafted tokens, so acceptance length = 1 + accepted_tokens / drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from infer.server.engine_loop import Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM numbers its data-parallel engines; here is one

FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
BETWEEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip


class Metrics:
    def __init__(self, model_name: str, snapshot: Callable[[], Snapshot]) -> None:
        self._registry = CollectorRegistry()
        self._labels = (model_name, ENGINE)
        self._registry.register(EngineCounters(self._labels, snapshot))
        self.first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token", FIRST_TOKEN_BUCKETS)
        self.between = self._histogram(
            "inter_token_latency_seconds", "Between two outputs of one request", BETWEEN_BUCKETS
        )
        self.request = self._histogram("e2e_request_latency_seconds", "Arrival to last token", REQUEST_BUCKETS)
        self._finished = Counter(
            "vllm:request_success", "Finished prompts", (*LABELS, "finished_reason"), registry=self._registry
        )
        for reason in ("stop", "length", "abort"):
            self._finished.labels(*self._labels, reason)  # so that a rate starts from 0

    def finished(self, reason: str, count: int = 1) -> None:
        self._finished.labels(*self._labels, reason).inc(count)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"vllm:{name}", help_text, LABELS, buckets=buckets, registry=self._registry)
        return family.labels(*self._labels)


class EngineCounters(Collector):
    def __init__(self, labels: tuple[str, str], snapshot: Callable[[], Snapshot]) -> None:
        self._labels, self._snapshot = labels, snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        gauges = (
            ("num_requests_running", "Requests being decoded or prefilled", now.running),
            ("num_requests_waiting", "Requests waiting for a place", now.waiting),
            ("kv_cache_usage_perc", "Share of the KV pages in use, 1 is all", now.kv_usage),
        )
        counters = (
            ("num_preemptions", "Requests put back to make room", now.preemptions),
            ("prompt_tokens", "Prompt tokens computed", now.prompt_tokens),
            ("generation_tokens", "Tokens emitted", now.generation_tokens),
            ("spec_decode_num_drafts", "Verifies that had drafted tokens", now.drafts),
            ("spec_decode_num_draft_tokens", "Drafted tokens", now.drafted),
            ("spec_decode_num_accepted_tokens", "Accepted drafted tokens", now.accepted),
        )
        for name, help_text, value in gauges:
            gauge = GaugeMetricFamily(f"vllm:{name}", help_text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, help_text, value in counters:
            counter = CounterMetricFamily(f"vllm:{name}", help_text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        positions = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafted tokens by position in the draft",
            labels=(*LABELS, "position"),
        )
        for position, value in enumerate(now.accepted_by_position):
            positions.add_metric((*self._labels, str(position)), value)
        yield positions
