"""Measures this engine and other programs on the same target, prompts and machine, in one alternating run.

    python scripts/bench.py model=demo head=eagle3
    python scripts/bench.py model=demo head=eagle3 systems=[off,head] concurrency=[1] rounds=5 save=generate
    python scripts/bench.py model=demo head=eagle3 systems=[off,head:chain5,head:tree16] temperatures=[0,0.6,1]
    python scripts/bench.py systems=[off,off:again,head:auto5] concurrency=[1,2,4,8,16,32,64] never_slower=0.02
    python scripts/bench.py systems=[off,head,vllm,vllm:head,llama.cpp,llama.cpp:head] model.dtype=bfloat16

scripts/bench_systems.py explains the systems' names. Every round runs every system once on the same prompts, in an
order that changes from round to round. `concurrency` prompts are in flight: whenever one finishes, the next starts.
With `min_tokens` the output lengths vary, as they do in serving. A ratio divides a system's speed by that of `off` in
the same round. For other programs the script counts the responses that equal those of `off`; in bf16 few do, because
each program rounds in a different order. The last line of standard output is one JSON document, which also states how
many steps of our engine were speculative and how long speculative and plain steps took. With `never_slower` the exit
code is 1 if an adaptive (`auto`) system was slower than plain decoding in any cell: where a cell would fail, its rounds
are repeated, at most twice, and all rounds count.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.environment  # noqa: F401

# isort: split

import datetime
import itertools
import json
import platform
import random
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from infer.cli import entry_point
from infer.config import BenchConfig
from infer.options.exported_heads import with_head
from infer.parallel.launched import launched_rank
from infer.speculation.control.step_times import StepTimes
from models.heads import HEADS
from scripts.bench_prompts import Task, read_tasks
from scripts.bench_systems import System, folder_of, is_adaptive, is_ours, make_systems


@dataclass
class Cell:
    """The measurements of one system at one temperature and concurrency."""

    tokens_per_s: list[float] = field(default_factory=list)  # one per round
    ratios: list[float] = field(default_factory=list)  # against `off` of the same round
    acceptance_length: float | None = None
    identical: bool | None = None  # token ids equal to those of `off`; None for another program
    steps: StepTimes | None = None  # of our engine, summed over the rounds
    agreement: tuple[int, int] | None = None  # another program's greedy responses: how many equal `off`'s, of how many


AGAIN = 2  # how often the rounds of a cell that seems slower than plain decoding are repeated

Results = dict[float, dict[int, dict[str, Cell]]]  # by temperature, concurrency and system


def count_matching(reference: list[list[int]], outputs: list[list[int]], ends: tuple[int, ...]) -> int:
    """Return how many outputs equal their reference up to its first end token, after which programs may differ."""

    def text(ids: list[int]) -> list[int]:
        return ids[: next((index for index, token in enumerate(ids) if token in ends), len(ids))]

    return sum(
        text(expected) == actual[: len(text(expected))] for expected, actual in zip(reference, outputs, strict=True)
    )


def measure(config: BenchConfig, systems: dict[str, System], tasks: list[Task], ends: tuple[int, ...]) -> Results:
    """Measure every system at every temperature and concurrency; `ends` are the target's end tokens.

    Ctrl-C stops the run and returns the cells that have at least one round.
    """
    from tqdm import tqdm

    results: Results = {}
    total = len(config.temperatures) * len(config.concurrency) * (1 + config.rounds) * len(systems)
    with tqdm(total=total, unit="run", disable=None, dynamic_ncols=True) as bar:
        for temperature, concurrency in itertools.product(config.temperatures, config.concurrency):
            cells = {name: Cell() for name in systems}
            try:
                warm_up(systems, tasks[:concurrency], temperature, bar)
                once = partial(run_round, systems, cells, tasks, concurrency, temperature, ends, bar)
                run_rounds(config, {temperature: {concurrency: cells}}, once, bar)
            except KeyboardInterrupt:
                print("interrupted: the report is of what was measured until now", file=sys.stderr)
                if all(cell.tokens_per_s for cell in cells.values()):
                    results.setdefault(temperature, {})[concurrency] = cells
                break
            results.setdefault(temperature, {})[concurrency] = cells
    return results


def warm_up(systems: dict[str, System], group: list[Task], temperature: float, bar: Any) -> None:
    for name, system in systems.items():
        bar.set_description(f"{name}, {len(group)} at once, warm-up")
        system.prepare()
        system.run(group, temperature, len(group))
        bar.update()


def run_rounds(config: BenchConfig, results: Results, once: Callable[[], None], bar: Any) -> None:
    """Run the rounds of the one cell group (temperature and concurrency) in `results`.

    They are repeated, up to AGAIN times, while an adaptive system seems slower than plain decoding: on a machine whose
    speed drifts, a few rounds can suggest that for any system.
    """
    for retries_left in reversed(range(1 + AGAIN)):
        for _ in range(config.rounds):
            once()
        slower = [] if config.never_slower is None else slower_than_plain(results, config.never_slower)
        if not slower or not retries_left:
            return
        bar.write(f"seems slower than plain decoding, {config.rounds} more rounds: {'; '.join(slower)}", sys.stderr)
        bar.total += config.rounds * len(config.systems)


def run_round(
    systems: dict[str, System],
    cells: dict[str, Cell],
    tasks: list[Task],
    concurrency: int,
    temperature: float,
    ends: tuple[int, ...],
    bar: Any,
) -> None:
    """Run every system once on all tasks and add the results to its cell.

    The order changes from round to round, because a system's position and its predecessor change its speed by more than
    some of the differences to be measured. Over as many rounds as there are systems, each runs once at every position.
    """
    turns, place = divmod(len(cells["off"].ratios), len(systems))
    order = random.Random(f"{temperature} {concurrency} {turns}").sample(list(systems), len(systems))
    order = order[place:] + order[:place]
    outputs, speeds = dict[str, list[list[int]]](), dict[str, float]()
    for name in order:
        bar.set_description(f"{name}, {concurrency} at once, temperature {temperature}")
        systems[name].prepare()
        begin = time.perf_counter()
        result = systems[name].run(tasks, temperature, concurrency)
        speeds[name] = sum(map(len, result.token_ids)) / (time.perf_counter() - begin)
        outputs[name], cells[name].acceptance_length = result.token_ids, result.acceptance_length
        if result.steps is not None:
            cells[name].steps = result.steps + (cells[name].steps or StepTimes())
        bar.update()
    reference = outputs["off"]
    for name, cell in cells.items():
        cell.tokens_per_s.append(speeds[name])
        cell.ratios.append(speeds[name] / speeds["off"])
        if is_ours(name):
            cell.identical = cell.identical is not False and outputs[name] == reference
        elif not temperature:
            same, total = cell.agreement or (0, 0)
            cell.agreement = same + count_matching(reference, outputs[name], ends), total + len(reference)


def slower_than_plain(results: Results, slack: float) -> list[str]:
    """Return a message for every cell in which an adaptive system is slower than plain decoding by more than `slack`
    plus the variation of plain decoding, as measured by `off:again`.
    """
    from infer.console.compare import Spread

    complaints = []
    for temperature, by_concurrency in results.items():
        for concurrency, cells in by_concurrency.items():
            noise = max(0.0, 1.0 - Spread.of(cells["off:again"].ratios).low) if "off:again" in cells else 0.0
            for name, cell in cells.items():
                ratio = Spread.of(cell.ratios).median if cell.ratios else 1.0
                if is_adaptive(name) and ratio < 1.0 - noise - slack:
                    complaints.append(
                        f"{name} at temperature {temperature:g}, {concurrency} at once: {ratio:.3f} (plain decoding "
                        f"repeated: down to {1 - noise:.3f}, slack {slack})"
                    )
    return complaints


def print_table(results: Results) -> None:
    from rich.console import Console
    from rich.table import Table

    from infer.console.compare import Spread

    table = Table(title="tokens/s; ratio to off of the same round, median (quartiles)")
    for column in ("temperature", "concurrency", "system", "tokens/s", "ratio", "τ", "same ids as off"):
        table.add_column(column, justify="right" if column != "system" else "left")
    for temperature, by_concurrency in results.items():
        for concurrency, cells in by_concurrency.items():
            for name, cell in cells.items():
                speed = Spread.of(cell.tokens_per_s).median
                ratio = Spread.of(cell.ratios) if cell.ratios else None
                table.add_row(
                    f"{temperature:g}",
                    str(concurrency),
                    name,
                    f"{speed:.1f}",
                    f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})" if ratio else "",
                    "" if cell.acceptance_length is None else f"{cell.acceptance_length:.2f}",
                    {None: "", True: "yes", False: "NO"}[cell.identical]
                    + (f"{cell.agreement[0]} of {cell.agreement[1]}" if cell.agreement else ""),
                )
    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(table)


def result_file(name: str, model: str, machine: dict[str, Any]) -> Path:
    hardware = (machine["gpu"] or f"{machine['cores']}-core-cpu").replace(" ", "-").lower()
    folder = Path(HERE) / "results"
    folder.mkdir(exist_ok=True)
    return folder / f"{name}-{model}_{hardware}_{datetime.date.today().isoformat()}.json"


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


def without_folders(value: Any) -> Any:
    """Return `value` without this machine's folders: paths become relative to the repository, outside it bare names."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if not isinstance(value, str) or not Path(value).is_absolute():
        return value
    path, root = Path(value), Path(HERE).parent
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def document(config: BenchConfig, results: Results, target: Any) -> dict:
    from infer.console.compare import Spread

    def cell(c: Cell) -> dict[str, Any]:
        return {
            "rounds": len(c.tokens_per_s),
            "tokens_per_s": asdict(Spread.of(c.tokens_per_s)),
            "ratio": asdict(Spread.of(c.ratios)) if c.ratios else None,
            "acceptance_length": c.acceptance_length,
            "identical": c.identical,
            "steps": c.steps and c.steps.summary(),
            "agreement": c.agreement,
        }

    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "target": {"path": without_folders(config.model.path), "fingerprint": target.fingerprint},
        "heads": head_summaries(head_folders(config)),
        "config": without_folders(asdict(config)),
        # by temperature, concurrency and system
        "results": {
            f"{temperature:g}": {str(n): {name: cell(c) for name, c in cells.items()} for n, cells in levels.items()}
            for temperature, levels in results.items()
        },
    }


def head_folders(config: BenchConfig) -> dict[str, Path]:
    """Return the folders of the exported heads that system names refer to, and of the configured head, by name."""
    names = {name.partition(":")[0] for name in config.systems} & {*HEADS}
    wanted = sorted(names | {config.head.name} - {"none"})
    return {name: folder_of(config, name if name in names else "head") for name in wanted}


def head_summaries(folders: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Return what the heads' provenance.json states about their training, by name, for heads that have that file."""
    kept = ("run", "steps", "tokens", "seconds", "trained_parameters", "acceptance_length", "acceptance_length_sampled")
    summaries = {}
    for name, folder in folders.items():
        path = folder / "provenance.json"
        if path.is_file():
            record = json.loads(path.read_text(encoding="utf-8"))
            summaries[name] = {key: record[key] for key in (*kept, "data_hash", "git") if key in record}
    return summaries


@entry_point("bench", BenchConfig)
def main(config: BenchConfig) -> None:
    if config.model.name != "demo" and not config.files:
        raise ValueError(
            f"model={config.model.name}: prompts are cut from the demo target's corpus; "
            "use model=demo, or give files=[...]"
        )
    if launched_rank(config.engine):
        from infer.parallel.launch import follow_launched

        return follow_launched(config.model, config.engine)
    from infer.engine import Engine

    if "off" not in config.systems:
        raise ValueError("systems: must hold off, which every ratio is taken against")
    config = with_head(config)
    # Every round repeats the prompts: a prefix cache would spare our engine the prefill, but not the other programs.
    cold = replace(config.engine, prefix_cache=False)
    engine = Engine.load(config.model, config.head, cold, config.proposer, output_dir=config.output_dir)
    assert engine.tokenizer is not None
    tasks = read_tasks(config, engine.tokenizer)
    with ExitStack() as stack:
        systems = make_systems(config, engine, stack)
        results = measure(config, systems, tasks, engine.end_tokens)
    if not results:
        raise KeyboardInterrupt
    print_table(results)
    report = document(config, results, engine.target)
    if config.save is not None:
        file = result_file(config.save, config.model.name, report["machine"])
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"written: {file.relative_to(Path(HERE).parent)}")
    slower = [] if config.never_slower is None else slower_than_plain(results, config.never_slower)
    for complaint in slower:
        print(f"slower than plain decoding: {complaint}", file=sys.stderr)
    print(json.dumps(report), flush=True)
    if slower:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
