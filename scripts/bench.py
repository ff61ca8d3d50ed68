"""Measures this engine and transformers' generate on the same target, prompts and machine, in one alternating run.

    python scripts/bench.py model=demo head=eagle3
    python scripts/bench.py model=demo head=eagle3 systems=[off,head] concurrency=[1] rounds=5 save=true

Systems: off, ngram, head (this engine), hf, hf_lookup (transformers' generate, plain and with prompt lookup; the latter
takes one prompt at a time). Every round runs every system once on the same prompts; a ratio is taken against `off` of
the same round. The last line of standard output is one JSON document.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
os.environ.setdefault("USE_HUB_KERNELS", "NO")

import datetime
import json
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from infer.cli import entry_point
from infer.config import BenchConfig


@dataclass
class Cell:
    """One system at one concurrency."""

    tokens_per_s: list[float] = field(default_factory=list)  # one per round
    ratios: list[float] = field(default_factory=list)  # against `off` of the same round
    acceptance_length: float | None = None
    identical: bool | None = None  # token ids equal to those of `off`; None for another program's


Answer = tuple[list[list[int]], float | None]  # token ids and acceptance length


def engine_systems(config: BenchConfig, engine: Any, params: Any) -> dict[str, Callable[[list[list[int]]], Answer]]:
    from infer.request import SpeculationStats

    def system(proposer: str) -> Callable[[list[list[int]]], Answer]:
        def run(prompts: list[list[int]]) -> Answer:
            engine.set_proposer(proposer)
            completions = engine.generate(prompts, params)
            stats = SpeculationStats()
            for completion in completions:
                stats.merge(completion.stats)
            return [c.token_ids for c in completions], stats.acceptance_length if proposer != "none" else None

        return run

    names = {"off": "none", "ngram": "ngram", "head": "head"}
    return {name: system(proposer) for name, proposer in names.items() if name in config.systems}


def transformers_systems(config: BenchConfig, path: str) -> dict[str, Callable[[list[list[int]]], Answer]]:
    import torch
    from transformers import AutoModelForCausalLM

    wanted = [name for name in ("hf", "hf_lookup") if name in config.systems]
    if not wanted:
        return {}
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, config.model.dtype)).eval()
    sampling: dict[str, Any] = {"do_sample": False} if config.temperature == 0 else {"do_sample": True}
    if config.temperature:
        sampling |= {"temperature": config.temperature, "top_k": 0}

    def generate(prompts: list[list[int]], **options: Any) -> list[list[int]]:
        ids = torch.tensor(prompts)  # all prompts have one length, so nothing is padded
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=config.max_tokens,
            max_new_tokens=config.max_tokens,
            pad_token_id=0,
            **sampling,
            **options,
        )
        return out[:, ids.shape[1] :].tolist()

    def plain(prompts: list[list[int]]) -> Answer:
        return generate(prompts), None

    def lookup(prompts: list[list[int]]) -> Answer:
        drafts = config.proposer.max_draft_tokens
        return [generate([prompt], prompt_lookup_num_tokens=drafts)[0] for prompt in prompts], None

    return {name: {"hf": plain, "hf_lookup": lookup}[name] for name in wanted}


def measure(
    config: BenchConfig, systems: dict[str, Callable[[list[list[int]]], Answer]], prompts: list[list[int]]
) -> dict[int, dict[str, Cell]]:
    from tqdm import tqdm

    results: dict[int, dict[str, Cell]] = {}
    total = len(config.concurrency) * (1 + config.rounds) * len(systems)
    with tqdm(total=total, unit="run", disable=None, dynamic_ncols=True) as bar:
        for concurrency in config.concurrency:
            cells = {name: Cell() for name in systems}
            groups = [prompts[start : start + concurrency] for start in range(0, len(prompts), concurrency)]
            for name, run in systems.items():  # warm-up
                bar.set_description(f"{name} at {concurrency}, warm-up")
                run(groups[0])
                bar.update()
            for _ in range(config.rounds):
                reference: list[list[int]] | None = None
                base = None
                for name, run in systems.items():
                    bar.set_description(f"{name} at {concurrency}")
                    begin = time.perf_counter()
                    answers = [run(group) for group in groups]
                    seconds = time.perf_counter() - begin
                    ids = [row for answer, _ in answers for row in answer]
                    cell = cells[name]
                    speed = sum(map(len, ids)) / seconds
                    cell.tokens_per_s.append(speed)
                    lengths = [length for _, length in answers if length is not None]
                    cell.acceptance_length = sum(lengths) / len(lengths) if lengths else None
                    if name == "off":
                        reference, base = ids, speed
                    if base is not None:
                        cell.ratios.append(speed / base)
                    if reference is not None and name in ("off", "ngram", "head"):
                        cell.identical = cell.identical is not False and ids == reference
                    bar.update()
            results[concurrency] = cells
    return results


def print_table(results: dict[int, dict[str, Cell]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from infer.compare import Spread

    table = Table(title="tokens/s; ratio to off of the same round, median (quartiles)")
    for column in ("concurrency", "system", "tokens/s", "ratio", "τ", "same ids as off"):
        table.add_column(column, justify="right" if column != "system" else "left")
    for concurrency, cells in results.items():
        for name, cell in cells.items():
            speed = Spread.of(cell.tokens_per_s).median
            ratio = Spread.of(cell.ratios) if cell.ratios else None
            table.add_row(
                str(concurrency),
                name,
                f"{speed:.1f}",
                f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})" if ratio else "",
                "" if cell.acceptance_length is None else f"{cell.acceptance_length:.2f}",
                {None: "", True: "yes", False: "NO"}[cell.identical],
            )
    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(table)


def describe_machine() -> dict[str, Any]:
    import torch
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip() or None,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def document(config: BenchConfig, results: dict[int, dict[str, Cell]], target: Any, head: dict[str, Any]) -> dict:
    from infer.compare import Spread

    def cell(c: Cell) -> dict[str, Any]:
        return {
            "tokens_per_s": asdict(Spread.of(c.tokens_per_s)),
            "ratio": asdict(Spread.of(c.ratios)) if c.ratios else None,
            "acceptance_length": c.acceptance_length,
            "identical": c.identical,
        }

    return {
        "bench": "generate",
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "target": {"path": config.model.path, "fingerprint": target.fingerprint},
        "head": head,
        "config": asdict(config),
        "results": {str(n): {name: cell(c) for name, c in cells.items()} for n, cells in results.items()},
    }


def head_summary(config: BenchConfig) -> dict[str, Any]:
    """What the exported head says of its own training, if there is one."""
    path = config.head.folder(config.output_dir, config.model.name) / "provenance.json"
    if config.head.name == "none" or not path.is_file():
        return {"name": None}
    provenance = json.loads(path.read_text(encoding="utf-8"))
    kept = ("run", "steps", "seconds", "acceptance_length", "data_hash", "git_commit")
    return {"name": config.head.name} | {key: provenance[key] for key in kept if key in provenance}


@entry_point("bench", BenchConfig)
def main(config: BenchConfig) -> None:
    if config.model.name != "demo":
        raise ValueError(f"model={config.model.name}: prompts are cut from the demo target's corpus; use model=demo")
    from infer.engine import Engine
    from infer.request import SamplingParams
    from models.demo.corpus import held_out_prompts

    if "off" not in config.systems:
        raise ValueError("systems: must hold off, which every ratio is taken against")
    # Every round repeats the prompts: pages that the last round left would spare ours the prefill, and no other's.
    cold = replace(config.engine, prefix_cache=False)
    engine = Engine.load(config.model, config.head, cold, config.proposer, output_dir=config.output_dir)
    if "head" in config.systems and engine.proposer_name != "head":
        raise ValueError(
            f"systems: head needs an exported head of {config.model.name}; train it (python train/run.py "
            f"model={config.model.name} head={config.head.name}), or drop it from systems"
        )
    assert engine.tokenizer is not None
    prompts = held_out_prompts(engine.tokenizer, config.num_prompts, config.prompt_tokens)
    params = SamplingParams(
        temperature=config.temperature, seed=config.seed, max_tokens=config.max_tokens, ignore_eos=True
    )
    systems = engine_systems(config, engine, params) | transformers_systems(config, str(engine.target.folder))
    systems = {name: systems[name] for name in sorted(systems, key=lambda name: name != "off")}
    results = measure(config, systems, prompts)
    print_table(results)
    report = document(config, results, engine.target, head_summary(config))
    if config.save:
        hardware = (report["machine"]["gpu"] or f"{report['machine']['cores']}-core-cpu").replace(" ", "-").lower()
        file = Path(HERE) / "results" / f"generate-{config.model.name}_{hardware}_{report['date']}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"written: {file.relative_to(Path(HERE).parent)}")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
