"""Sends a running server one kind of requests after the other, and records how well its drafts are accepted over time.

    python infer/serve.py learn=true learning.pause_above=1
    python scripts/bench.py traffic root=/path/to/sets save=learning
    python infer/serve.py
    python scripts/bench.py traffic root=/path/to/sets like=scripts/results/<result>

`kinds` names prompts of conf/traffic.yaml, or `'+prompts.mine=mine.jsonl' kinds=[mine]`. Every request is sent once,
`concurrency` at a time, and each kind for `minutes`, or until its prompts are used up. After every `window` requests
the counters of /metrics are read: a row has its kind, when it ended, and τ and tokens/s within it, with what the server
says of a head that learns. With `like` the requests are exactly those of an earlier result, so a server without
learning is seen on the same text, however long it takes, and both are drawn in one plot. The last line of standard
output is one JSON document.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from infer.options.cli import entry_point
from infer.options.paths import resolve_path
from scripts.benchmarks.comparison.servers import counters
from scripts.benchmarks.config import TrafficConfig
from scripts.benchmarks.document import describe_machine, publish, without_folders
from scripts.benchmarks.prompts import read_file

COUNTERS = ("headway_spec_decode_num_drafts_total", "headway_spec_decode_num_accepted_tokens_total")
LEARNING = "headway_learning_"
TIMEOUT_S = 600.0
REQUESTS = ("kinds", "prompts", "columns", "num_prompts", "prompt_tokens", "max_tokens", "temperature", "seed")

Row = dict[str, Any]  # of a window


class Client:
    """Asks a server. Raises ValueError if it is not there, or refuses a request."""

    def __init__(self, config: TrafficConfig) -> None:
        self.config = config
        self._http = httpx.Client(base_url=config.url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))

    def _send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ValueError(f"url={self.config.url}: {error}; start it with python infer/serve.py") from error
        if response.status_code != 200:
            raise ValueError(f"url={self.config.url}: {response.status_code}: {response.text[:300]}")
        return response

    def metrics(self) -> dict[str, float]:
        return counters(self._send("GET", "/metrics").text)

    def ask(self, prompt: Sequence[int]) -> int:
        """Return the number of tokens of the response."""
        sampling = {key: getattr(self.config, key) for key in ("max_tokens", "temperature", "seed")}
        body = {"model": self.config.model.name, "prompt": list(prompt), **sampling}
        return self._send("POST", "/v1/completions", body).json()["usage"]["completion_tokens"]

    def window(self, prompts: Sequence[Sequence[int]]) -> Row:
        """Send the prompts, and return what the counters say of them."""
        before, begin = self.metrics(), time.perf_counter()
        with ThreadPoolExecutor(self.config.concurrency) as pool:
            tokens = sum(pool.map(self.ask, prompts))
        seconds, after = time.perf_counter() - begin, self.metrics()
        verifies, accepted = (after.get(name, 0.0) - before.get(name, 0.0) for name in COUNTERS)
        return {
            "requests": len(prompts),
            "tokens": tokens,
            "tokens_per_s": round(tokens / seconds, 1),
            "tau": round(1 + accepted / verifies, 4) if verifies else None,
            "learning": {name.removeprefix(LEARNING): v for name, v in after.items() if name.startswith(LEARNING)},
        }


def measure(
    config: TrafficConfig, client: Client, kinds: dict[str, list[list[int]]], like: Sequence[Row]
) -> Iterator[Row]:
    """Yield the rows as they are measured: of `like` as many as it has of each kind, else for `minutes`."""
    begin = time.perf_counter()
    for kind, prompts in kinds.items():
        sizes = [row["requests"] for row in like if row["kind"] == kind] if like else [config.window] * len(prompts)
        ends, used = time.perf_counter() + 60 * config.minutes, 0
        for size in sizes:
            if used == len(prompts) or not (like or time.perf_counter() < ends):
                break
            row = client.window(prompts[used : used + size])
            used += row["requests"]
            yield {"kind": kind, "minute": round((time.perf_counter() - begin) / 60, 2), **row}


def read_kinds(config: TrafficConfig) -> dict[str, list[list[int]]]:
    """Return the prompts of each kind. Raises ValueError for a file that cannot be read or holds none that fit."""
    from models.targets import resolve_checkpoint
    from models.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve_checkpoint(config.model.path_or_hub_id, config.model.revision, weights=False))
    count, longest = config.num_prompts, config.prompt_tokens
    options = {"root": config.root, "interleave": True}
    return {
        kind: read_file(config, f"prompts.{kind}", config.prompts[kind], tokenizer, count, longest, **options)
        for kind in config.kinds
    }


def read_like(config: TrafficConfig) -> list[Row]:
    """Return the rows of an earlier document, none without `like`.

    Raises ValueError if it is not of this subcommand, or if these requests would be others.
    """
    if config.like is None:
        return []
    try:
        earlier = json.loads(resolve_path(config.like).read_text(encoding="utf-8"))
        before, rows = earlier["config"], earlier["results"]
        if not all({"kind", "requests", "minute"} <= set(row) for row in rows):
            raise ValueError("it holds no rows of requests")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"like={config.like}: not a result of bench.py traffic ({error})") from error
    now = without_folders(asdict(config))
    if other := [key for key in REQUESTS if before.get(key) != now[key]]:
        raise ValueError(f"like={config.like}: has {other[0]}={before.get(other[0])}; say the same here")
    return rows


def draw_rows(path: Path, rows: Sequence[Row], like: Sequence[Row]) -> Path | None:
    """Draw τ over time; rows that repeat earlier requests stand where those stood."""
    from train.publishing.plots import Panel, draw

    curves = {
        label: [(place["minute"], row["tau"]) for place, row in zip(like or rows, some, strict=False) if row["tau"]]
        for label, some in (("earlier", like), ("these", rows))
    }
    kinds = dict.fromkeys(row["kind"] for row in rows)
    return draw(path, Panel(curves, "minutes", "tokens per verify", ", then ".join(kinds)))


@entry_point("traffic", TrafficConfig)
def main(config: TrafficConfig) -> None:
    from tqdm import tqdm

    from train.storage.atomic import make_folder

    plot = resolve_path(config.output_dir) / "bench" / "traffic.png"
    make_folder(plot.parent)  # refuses a place that cannot be written, before anything is measured
    like, client = read_like(config), Client(config)
    client.metrics()  # refuses a server that is not there before prompts are read
    kinds, rows, failure = read_kinds(config), list[Row](), None
    try:
        with tqdm(unit="window", disable=None, dynamic_ncols=True) as bar:
            for row in measure(config, client, kinds, like):
                rows.append(row)
                bar.update()
                bar.set_postfix_str(f"{row['kind']}, τ {row['tau']}, {row['tokens_per_s']} tokens/s")
    except KeyboardInterrupt:
        print("interrupted: the report is of what was measured until now", file=sys.stderr)
    except ValueError as error:  # the server has ended, maybe after hours
        failure = error
    if draw_rows(plot, rows, like):
        print(f"written: {plot}")
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "config": without_folders(asdict(config)),
        "results": rows,
    }
    publish(report, config.save, config.model.name)
    if failure is not None:
        raise failure
