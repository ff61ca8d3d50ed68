"""Prometheus metrics, each exported as `headway_...` and under vLLM's name, `vllm:...`.

vLLM's dashboards and `vllm bench serve` therefore work unchanged. Engine counters are read from the runtime's snapshot
at scrape time; latencies are observed as outputs arrive. A draft is one verify that contained draft tokens, so
acceptance length = 1 + accepted_tokens / drafts. A server that never drafts exports no speculation metrics, and one
whose head does not learn none of learning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partialmethod

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from infer.learning.status import LearningStatus
from infer.steps.stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM numbers its data-parallel engines; this server has one

FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
GAP_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip


OURS, VLLMS = "headway_", "vllm:"


class Metrics:
    """The metrics of one server. `speculative` is set when the engine is attached: whether it has a proposer."""

    def __init__(
        self,
        model_name: str,
        snapshot: Callable[[], EngineStats],
        stalls: Callable[[], int],
        learning: Callable[[], LearningStatus | None],
    ) -> None:
        self.speculative = False
        self._registry = CollectorRegistry()
        self._labels = (model_name, ENGINE)
        self._registry.register(EngineCounters(self._labels, snapshot, stalls, lambda: self.speculative, learning))
        self.first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token", FIRST_TOKEN_BUCKETS)
        self.between = self._histogram("inter_token_latency_seconds", "Between two outputs of a request", GAP_BUCKETS)
        self.queue = self._histogram("request_queue_time_seconds", "Arrival to first step", REQUEST_BUCKETS)
        self.request = self._histogram("e2e_request_latency_seconds", "Arrival to last token", REQUEST_BUCKETS)
        names = (*LABELS, "finished_reason")
        self._finished = Counter(f"{OURS}request_success", "Finished responses", names, registry=self._registry)
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(*self._labels, reason)  # creates the series, so that a rate starts from 0
        self._all = CollectorRegistry()
        ProcessCollector(registry=self._all)  # memory, files and CPU time under the standard names
        self._all.register(WithAliases(self._registry))

    def finished(self, reason: str, count: int = 1) -> None:
        self._finished.labels(*self._labels, reason).inc(count)

    def text(self) -> bytes:
        return generate_latest(self._all)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"{OURS}{name}", help_text, LABELS, buckets=buckets, registry=self._registry)
        return family.labels(*self._labels)


class WithAliases(Collector):
    """Exports every metric family of a registry twice: under its own name and under vLLM's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        families = list(self._registry.collect())
        yield from families
        for family in families:
            alias = Metric(family.name.replace(OURS, VLLMS, 1), family.documentation, family.type)
            alias.samples = [
                Sample(name.replace(OURS, VLLMS, 1), labels, value) for name, labels, value, *_ in family.samples
            ]
            yield alias


@dataclass(eq=False)
class EngineCounters(Collector):
    labels: tuple[str, str]
    snapshot: Callable[[], EngineStats]
    stalls: Callable[[], int]
    speculative: Callable[[], bool]
    learning: Callable[[], LearningStatus | None]

    def collect(self) -> Iterator[Metric]:
        now = self.snapshot()
        speculation, forecast = now.speculation, now.forecast
        drafts = sum(speculation.drafted_by_position[:1])  # verifies that contained draft tokens
        yield self._gauge("num_requests_running", "Requests in prefill or decode", now.running)
        yield self._gauge("num_requests_waiting", "Requests waiting to be scheduled", now.waiting)
        yield self._gauge("kv_cache_usage_perc", "KV cache usage, 1 means full", now.kv_usage)
        if forecast is not None:
            yield self._gauge("draft_depth", "Draft depth chosen by the controller, 0 without drafts", forecast.depth)
            yield self._gauge("expected_speedup", "Expected speedup over plain decoding", forecast.speedup)
            yield self._gauge("draft_calibration", "Ratio of accepted to expected tokens, recently", forecast.bias)
        if forecast is not None and forecast.errors is not None:
            brier, by_history = forecast.errors
            yield self._gauge("draft_brier_score", "Recent Brier score of acceptance probabilities", brier)
            yield self._gauge("draft_brier_score_by_history", "The same by depth and history only", by_history)
        yield self._counter("num_preemptions", "Pre-emptions of requests to free KV pages", now.preemptions)
        yield self._counter("prompt_tokens", "Prompt tokens", now.prompt_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", now.prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", now.cached_tokens)
        yield self._counter("generation_tokens", "Generated tokens", now.generation_tokens)
        yield self._counter("engine_stalls", "Engine steps that took longer than server.stall_s", self.stalls())
        if (learning := self.learning()) is not None:
            yield from self._learning(learning)
        if not self.speculative() and not drafts:  # a request may name a proposer even if the server has no default
            return
        yield self._counter("spec_decode_num_drafts", "Verifies with drafted tokens", drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Drafted tokens", speculation.drafted)
        yield self._counter("spec_decode_num_accepted_tokens", "Accepted drafted tokens", speculation.accepted)
        positions = CounterMetricFamily(
            f"{OURS}spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafted tokens by position in the draft",
            labels=(*LABELS, "position"),
        )
        for position, value in enumerate(speculation.accepted_by_position):
            positions.add_metric((*self.labels, str(position)), value)
        yield positions

    def _learning(self, now: LearningStatus) -> Iterator[Metric]:
        yield self._gauge("learning_running", "1 while the process runs that trains the head", now.running)
        if not math.isnan(now.tau):  # once it was judged
            yield self._gauge("learning_acceptance_length", "Tokens per verify, on requests held back", now.tau)
        if not math.isnan(now.replay_after):
            yield self._gauge("learning_replay_acceptance_length", "The same, on learning.replay", now.replay_after)
        yield self._gauge("learning_buffered_tokens", "Tokens of requests that are kept to learn from", now.buffered)
        yield self._counter("learning_heads_taken_over", "Heads that drafted better", now.taken_over)
        yield self._counter("learning_heads_refused", "Heads that did not fit the engine", now.refused)
        yield self._counter("learning_examples", "Requests that the head can learn from", now.examples)
        yield self._counter("learning_examples_dropped", "Those that were not read in time", now.dropped)
        yield self._counter("learning_updates", "Updates of the head", now.updates)
        yield self._counter("learning_seconds", "Time of one CPU thread for updates and comparisons", now.seconds)

    def _one(self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, value: float) -> Metric:
        family = kind(f"{OURS}{name}", text, labels=LABELS)
        family.add_metric(self.labels, value)
        return family

    _gauge, _counter = partialmethod(_one, GaugeMetricFamily), partialmethod(_one, CounterMetricFamily)
