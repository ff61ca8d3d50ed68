"""The names and the arithmetic that dashboards and `vllm bench serve` rely on."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.server import patient
from tests.server.harness import MODEL, MakeServer, Server, wait_until

COUNTERS = (
    "num_preemptions",
    "prompt_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "generation_tokens",
    "request_success",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
)
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_queue_time_seconds",
    "e2e_request_latency_seconds",
)


def test_vllm_s_names_types_and_labels(server: Server) -> None:
    server.complete(prompt="x = 1\n" * 6, max_tokens=20, temperature=0, ignore_eos=True)
    response = patient.get(f"{server.url}/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    for kind, names in (("counter", COUNTERS), ("gauge", GAUGES), ("histogram", HISTOGRAMS)):
        for name in names:
            family = families[f"vllm:{name}"]
            assert family.type == kind
            headway_family = families[f"headway_{name}"]
            assert [sample.value for sample in headway_family.samples] == [sample.value for sample in family.samples]
            for sample in family.samples:
                assert sample.labels["model_name"] == MODEL
                assert sample.labels["engine"] == "0"
    for name in COUNTERS:
        assert f"\nvllm:{name}_total{{" in response.text
    positions = [
        sample.labels["position"] for sample in families["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    ]
    assert [name for name in positions if name] == sorted(set(positions))


def test_the_process_is_measured(server: Server) -> None:
    now = server.metrics()
    assert now["process_resident_memory_bytes"] > 2**20
    assert now["process_open_fds"] > 3
    assert not any(name.startswith("vllm:process") for name in now)


def test_counters_add_up(make_server: MakeServer) -> None:
    with make_server() as server:
        usages = [
            server.complete(prompt=prompt, max_tokens=tokens, seed=1, ignore_eos=True).json()["usage"]
            for prompt, tokens in (("def f(", 12), ("x = 1\n" * 6, 30), (["a", "b"], 5))
        ]
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 0)
        now = server.metrics()
    details = [usage["completion_tokens_details"] for usage in usages]
    accepted = sum(detail["accepted_prediction_tokens"] for detail in details)
    drafted = accepted + sum(detail["rejected_prediction_tokens"] for detail in details)
    assert now["vllm:prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert now["vllm:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages) == 52
    assert now["vllm:spec_decode_num_accepted_tokens_total"] == accepted
    assert now["vllm:spec_decode_num_draft_tokens_total"] == drafted
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    positions = {name: value for name, value in now.items() if name.startswith(per_position)}
    assert sum(positions.values()) == accepted
    assert set(positions) <= {f'{per_position}{{position="{p}"}}' for p in range(4)}
    assert 0 < now["vllm:spec_decode_num_drafts_total"] <= drafted
    assert now['vllm:request_success_total{finished_reason="length"}'] == 4
    assert now['vllm:request_success_total{finished_reason="abort"}'] == 0
    assert now["vllm:time_to_first_token_seconds_count"] == now["vllm:e2e_request_latency_seconds_count"] == 4
    assert now["vllm:inter_token_latency_seconds_count"] > 0


def test_without_speculation_nothing_is_said_about_it(make_server: MakeServer) -> None:
    with make_server(proposer="none") as server:
        server.complete(max_tokens=5, ignore_eos=True)
        now = server.metrics()
    assert now["vllm:generation_tokens_total"] == 5
    assert [name for name in now if "spec_decode" in name] == []
