"""served.py as a user runs it on the tiny target and our own server, and the statistics of a load test."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from infer.options.cli import compose
from models.tokenizer import Tokenizer
from scripts import make_tables
from scripts.config import BenchConfig, ServedConfig
from scripts.harness import count_matching
from scripts.peer_servers import LlamaServer, Server, Variant, free_port, llama_command, make_server, variant_of
from scripts.served import Load, RequestTrace, arrivals, earlier, percentiles, summary
from scripts.systems import read_prompts

ROOT = Path(__file__).resolve().parents[2]


def test_arrivals_are_a_poisson_process_and_the_same_for_every_server() -> None:
    times = arrivals(50.0, 40.0, seed=1)
    assert times == arrivals(50.0, 40.0, seed=1) != arrivals(50.0, 40.0, seed=2)
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 40
    assert abs(len(times) - 2000) < 5 * 2000**0.5
    gaps = [b - a for a, b in itertools.pairwise(times)]
    longer = sum(gap > 1 / 50 for gap in gaps) / len(gaps)
    assert abs(longer - 0.368) < 0.05  # 1/e of the gaps of a Poisson process are longer than their mean


def test_a_request_that_is_unfinished_counts_with_the_time_that_it_waited() -> None:
    heard = [
        RequestTrace(due=0.0, first=0.5, last=1.4, tokens=10, in_time=10),
        RequestTrace(due=1.0, first=3.0, last=3.9, tokens=4, in_time=1),
        RequestTrace(due=2.0),
        RequestTrace(due=2.5, refused=True),
    ]
    level = summary(1.5, heard, seconds=3.0, end=4.0, max_tokens=10)
    assert (level.finished, level.unfinished, level.refused) == (1, 3, 1)
    assert (level.requests_per_s, level.tokens_per_s) == (4 / 3, 11 / 3)
    assert level.latency_s == {"p50": 2.0, "p90": 3.0}  # of 1.4, 1.5, 2 and 3 seconds
    assert level.first_token_s == {"p50": 2.0, "p90": 2.0}  # of 0.5, 1.5, 2 and 2
    assert level.token_s["p50"] == pytest.approx(0.3)  # of 0.1 and 0.3
    assert percentiles([]) == {}


def test_a_median_with_dropped_requests_is_said_to_be_a_lower_bound() -> None:
    levels = [
        {"load": load, "tokens_per_s": 70.4, "unfinished": unfinished, "latency_s": {"p50": 1.25}}
        for load, unfinished in ((0.5, 0), (3.0, 7))
    ]
    assert make_tables.by_load({"results": {"vllm:head:chain3": levels}}).splitlines() == [
        "|  | load 0.5 | load 3 |",
        "| --- | --- | --- |",
        "| vLLM, head, chain 3 | 70, 1.25 s | 70, ≥ 1.25 s |",
    ]


def test_a_server_slower_than_the_measurement_has_a_capacity() -> None:
    class SlowLoad(Load):
        async def ask(self, number: int, heard: RequestTrace) -> None:
            await asyncio.sleep(0.1)
            heard.tokens = self.config.max_tokens

    config = compose("served", ServedConfig, ["slots=2"])
    server = Server("slow", "slow", [], 1, {}, Path("log"))
    assert asyncio.run(SlowLoad(server, config, []).closed(seconds=0.0)) > 0


def test_answers_agree_up_to_the_end_of_the_text() -> None:
    outputs = [[1, 2, 3], [1, 0, 9], [4, 5, 6]]
    assert count_matching(outputs, [[1, 2, 3], [1, 0, 7], [4, 5, 7]], ends=(0,)) == 2
    assert count_matching(outputs, [[1, 2, 3], [1, 0, 7], [4, 5, 7]], ends=()) == 1


def test_results_of_other_settings_are_not_added_to(tmp_path: Path) -> None:
    before = {"name": "x", "target": {"dtype": "float32"}, "settings": {}, "capacity": 2.0, "results": {"server": []}}
    (tmp_path / "x.json").write_text(json.dumps(before))
    assert earlier(tmp_path / "x.json", before) == {"server": []}
    assert earlier(tmp_path / "y.json", before) == {}
    with pytest.raises(ValueError, match=r"save=x: x\.json was measured with another capacity: 2\.0"):
        earlier(tmp_path / "x.json", before | {"capacity": 3.0})


def test_prompts_come_from_the_files_in_turn(
    tiny_target_folder: Path, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Conversations are used whole or not at all; texts are truncated."""
    for name, rows in {
        "asked": [{"question": "x" * 400}, *({"question": f"x{number}"} for number in range(2))],
        "texts": [{"text": f"{number} " + "y " * 400} for number in range(2)],
    }.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chats = [tiny_tokenizer.apply_chat_template([{"role": "user", "content": f"x{number}"}]) for number in range(2)]
    longest = max(map(len, chats))
    files = f"files=[{tmp_path / 'asked.jsonl'},{tmp_path / 'texts.jsonl'}]"
    options = [f"model.path={tiny_target_folder}", files, "columns={prompt: question}", f"prompt_tokens={longest}"]
    prompts = read_prompts(compose("bench", BenchConfig, [*options, "num_prompts=3"]))
    assert sorted(prompts[::2]) == sorted(chats)
    assert [len(prompts), len(prompts[1])] == [3, longest]
    with pytest.raises(ValueError, match=r"asked\.jsonl\]: holds 2 prompts of up to \d+ tokens; num_prompts=5 needs 3"):
        read_prompts(compose("bench", BenchConfig, [*options, "num_prompts=5"]))


@pytest.fixture(autouse=True)
def _at_this_processors_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lower level has a llama.cpp of its own, and no vLLM."""
    monkeypatch.delenv("HEADWAY_CPU_LEVEL", raising=False)


@pytest.mark.parametrize(
    ("system", "message"),
    [
        ("vllm", r"peers=nowhere: .*nowhere/vllm/bin/python is not there; build it with scripts/peers.sh vllm"),
        ("llama.cpp:head", r"build it with scripts/peers.sh llama.cpp"),
        ("vllm:suffix", "vllm drafts with ngram or head"),
        ("vllm:head:tree16", "vllm drafts chains"),
    ],
)
def test_a_server_that_cannot_run_is_named(system: str, message: str) -> None:
    config = compose("served", ServedConfig, ["peers=nowhere"])
    with pytest.raises(ValueError, match=message):
        make_server(system, config, slots=1, context=128)


def test_what_a_server_s_name_says() -> None:
    assert variant_of("vllm") == Variant("vllm", None, "", "")
    assert variant_of("server:head:auto3") == Variant("server", None, "head", "auto3")
    assert variant_of("llama.cpp:ngram") == Variant("llama.cpp", None, "ngram", "")
    assert variant_of("llama.cpp:threads1:head:chain3") == Variant("llama.cpp", 1, "head", "chain3")
    server = LlamaServer("llama.cpp:threads1", "tiny", [], 1, {}, Path("log"))
    assert not server.drafts
    assert [server.body([1], 2, temperature, 0)["top_k"] for temperature in (0.0, 0.7)] == [1, 0]
    assert make_tables.label("llama.cpp:threads1:ngram") == "llama.cpp, threads 1, n-gram lookup"


def test_llama_cpp_reads_the_file_itself(tmp_path: Path) -> None:
    for name in ("small.Q4_1.gguf", "peers/llama.cpp/build/bin/llama-server"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    options = [f"model.path={tmp_path}/small.Q4_1.gguf", f"peers={tmp_path}/peers"]
    config = compose("served", ServedConfig, options)
    command, _ = llama_command(config, variant_of("llama.cpp:threads1:ngram:chain3"), 3, 8000, 4, 256)
    settings = dict(itertools.pairwise(command))
    assert settings["-m"] == str(tmp_path / "small.Q4_1.gguf")
    assert (settings["-t"], settings["-tb"], settings["-np"], settings["-c"]) == ("1", str(os.cpu_count()), "4", "1024")
    assert (settings["--spec-type"], settings["--spec-ngram-simple-size-m"]) == ("ngram-simple", "3")


def test_a_server_at_rest_stands_still_and_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.peer_servers.GRACE_S", 300.0)
    (tmp_path / "health").write_text("well")
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    with Server("files", "files", command, port, {}, tmp_path / "log") as server:
        server.rest()
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{server.url}/health", timeout=0.5)
        with server.awake():
            assert httpx.get(f"{server.url}/health", timeout=30).text == "well"
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{server.url}/health", timeout=0.5)
        process = server._process
    assert process is not None
    assert process.returncode == -signal.SIGTERM
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", timeout=5)


@pytest.mark.slow
def test_our_server_under_a_load(tiny_target_folder: Path, tiny_head_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "scripts/served.py", f"model.path={tiny_target_folder}", f"head.path={tiny_head_folder}"]
    command += [f"output_dir={tmp_path}", "systems=[server:head:chain2]", "loads=[0.5,3]", "seconds=1", "slots=4"]
    command += ["num_prompts=4", "prompt_tokens=16", "max_tokens=8", "engine.max_tokens_in_cache=1024"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    document = json.loads(ran.stdout.splitlines()[-1])
    low, high = document["results"]["server:head:chain2"]
    assert document["capacity"] > 0
    assert (low["load"], high["load"]) == (0.5, 3.0)
    for level in (low, high):
        num_requests = len(arrivals(level["load"] * document["capacity"], 1, ServedConfig.seed))
        assert level["requests_per_s"] == level["finished"] + level["unfinished"] == num_requests
        assert level["refused"] == 0
        assert 0 <= level["tokens_per_s"] <= 8 * num_requests
        if num_requests:  # none arrives in a second if the machine is busy and the capacity low
            assert 0 < level["first_token_s"]["p50"] <= level["latency_s"]["p50"]
    table = make_tables.by_load(document)
    assert table.startswith("|  | load 0.5 | load 3 |\n")
    assert f"| Headway's server, head, chain 2 | {low['tokens_per_s']:.0f}, " in table
    make_tables.plot_load(document, tmp_path / "served.png")
    assert (tmp_path / "served.png").stat().st_size > 10_000
