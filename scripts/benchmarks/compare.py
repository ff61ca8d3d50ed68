"""Measures this engine and other programs on the same target, prompts and machine, in one alternating run.

    python scripts/bench.py model=demo head=eagle3
    python scripts/bench.py systems=[off,off:again,head:auto5] concurrency=[1,2,4,8,16,32,64] never_slower=0.02
    python scripts/bench.py systems=[off,head,vllm,vllm:head,llama.cpp,llama.cpp:head] model.dtype=bfloat16

scripts/benchmarks/comparison/systems.py explains the systems' names. Every round runs every system once on the same
prompts, in an order that changes from round to round. `concurrency` prompts are in flight: whenever one finishes, the
next starts. With `min_tokens` the output lengths vary, as they do in serving. A ratio divides a system's speed by that
of `off` in the same round. For other programs the script counts the responses that equal those of `off`; in bf16 few
do, because each program rounds in a different order. The last line of standard output is one JSON document, which also
states how many steps of our engine were speculative and how long speculative and plain steps took. With `never_slower`
the exit code is 1 if an adaptive (`auto`) system was slower than plain decoding in any cell: where a cell would fail,
its rounds are repeated, at most twice, and all rounds count.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from infer.console.compare import Pair
from infer.options.cli import engine_entry_point
from scripts.benchmarks.comparison.rounds import OFF, run_round, summary
from scripts.benchmarks.comparison.systems import System, is_adaptive, make_systems
from scripts.benchmarks.config import CompareConfig
from scripts.benchmarks.document import document, publish, table
from scripts.benchmarks.prompts import Task, read_tasks

AGAIN = 2  # how often the rounds of a cell that seems slower than plain decoding are repeated

Results = dict[str, dict[str, dict[str, dict[str, Any]]]]  # by temperature, concurrency and system: `summary`


def measure(config: CompareConfig, systems: Mapping[str, System], tasks: list[Task], ends: tuple[int, ...]) -> Results:
    """Measure every system at every temperature and concurrency; `ends` are the target's end tokens.

    Ctrl-C stops the run and returns the cells that have at least one round.
    """
    from tqdm import tqdm

    results: Results = {}
    total = len(config.temperatures) * len(config.concurrency) * (1 + config.rounds) * len(systems)
    with tqdm(total=total, unit="run", disable=None, dynamic_ncols=True) as bar:
        try:
            for temperature, concurrency in itertools.product(config.temperatures, config.concurrency):
                run_round(systems, tasks[:concurrency], temperature, concurrency, 0, bar)  # warm-up
                pairs = {name: list[Pair]() for name in systems}
                for number in itertools.count(1):
                    runs = run_round(systems, tasks, temperature, concurrency, number - 1, bar)
                    for name, each in pairs.items():
                        each.append(Pair(runs[OFF], runs[name]))
                    cells = {name: summary(name, each, ends, greedy=not temperature) for name, each in pairs.items()}
                    results.setdefault(f"{temperature:g}", {})[str(concurrency)] = cells
                    sets, rest = divmod(number, config.rounds)
                    if rest:
                        continue
                    group = {f"{temperature:g}": {str(concurrency): cells}}
                    slower = slower_than_plain(group, config.never_slower) if sets <= AGAIN else []
                    if not slower:
                        break
                    # on a machine whose speed drifts, a few rounds can suggest that of any system
                    again = f"{config.rounds} more rounds: {'; '.join(slower)}"
                    bar.write(f"seems slower than plain decoding, {again}", sys.stderr)
                    bar.total += config.rounds * len(config.systems)
        except KeyboardInterrupt:
            print("interrupted: the report is of what was measured until now", file=sys.stderr)
    return results


def slower_than_plain(results: Results, slack: float | None) -> list[str]:
    """Return a message for every cell in which an adaptive system is slower than plain decoding by more than `slack`
    plus the variation of plain decoding, as measured by `off:again`. None allows everything.
    """
    complaints = []
    if slack is None:
        return []
    for temperature, by_concurrency in results.items():
        for concurrency, cells in by_concurrency.items():
            noise = max(0.0, 1.0 - cells["off:again"]["ratio"]["low"]) if "off:again" in cells else 0.0
            for name, cell in cells.items():
                ratio = cell["ratio"]["median"]
                if is_adaptive(name) and ratio < 1.0 - noise - slack:
                    complaints.append(
                        f"{name} at temperature {temperature}, {concurrency} at once: {ratio:.3f} (plain decoding "
                        f"repeated: down to {1 - noise:.3f}, slack {slack})"
                    )
    return complaints


def card(results: Results) -> str:
    """Return a table with one row per cell; "same" is about the token ids of `off`."""
    return table(
        [
            {
                "temperature": temperature,
                "at once": concurrency,
                "system": name,
                "tokens/s": cell["tokens_per_s"]["median"],
                "ratio": cell["ratio"]["median"],
                "quartiles": [cell["ratio"]["low"], cell["ratio"]["high"]],
                "τ": cell["acceptance_length"],
                "same": cell["identical"] if cell["agreement"] is None else "{} of {}".format(*cell["agreement"]),
            }
            for temperature, by_concurrency in results.items()
            for concurrency, cells in by_concurrency.items()
            for name, cell in cells.items()
        ],
        pad=True,
    )


@engine_entry_point("bench", CompareConfig)
def main(config: CompareConfig) -> None:
    from infer.engine import Engine

    if OFF not in config.systems:
        raise ValueError("systems: must hold off, which every ratio is taken against")
    tasks = read_tasks(config)
    # Every round repeats the prompts: a prefix cache would spare our engine the prefill, but not the other programs.
    cold = replace(config.engine, prefix_cache=False)
    engine = Engine.load(config.model, config.head, cold, config.proposer, output_dir=config.output_dir)
    with ExitStack() as stack:
        results = measure(config, make_systems(config, engine, stack), tasks, engine.end_tokens)
    if not results:
        raise KeyboardInterrupt
    print(card(results), end="")
    slower = slower_than_plain(results, config.never_slower)
    for complaint in slower:
        print(f"slower than plain decoding: {complaint}", file=sys.stderr)
    publish(document(config, engine.target.fingerprint, results), config.save, config.model.name)
    if slower:
        raise SystemExit(1)
