"""Disturbs servers and training runs at random, and checks that no answer, file or bit is lost.

    python scripts/chaos.py seed=1 minutes=60
    python scripts/chaos.py seed=1 rounds=1 faults=[server,"training: kill"]

docs/chaos.md lists the faults and what must hold after each. Written to <output_dir>/chaos/<model>/: report.json, and
the logs of all processes. Exit code 1: something did not hold, or no fault was run. Ctrl-C reports what was done.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import json
import signal
import time
from collections import Counter
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from infer.options.cli import entry_point
from infer.processes.process_end import run_process
from infer.settings.paths import resolve_path, short
from scripts.faults.config import ChaosConfig


@entry_point("chaos", ChaosConfig)
def main(config: ChaosConfig) -> None:
    from scripts.faults.lab import Broken, Lab
    from scripts.faults.serving import Servers
    from scripts.faults.training import Trainings

    folder = resolve_path(config.output_dir) / "chaos" / config.model.name
    report: dict[str, Any] = {"seed": config.seed, "model": config.model.name, "unfinished": "it was interrupted"}
    report |= {"faults": {}, "broken": []}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it too ends what was started
    lab = Lab(folder, config.seed)
    words = [word for word in sys.argv[1:] if word.startswith("model")] or ["model=demo"]
    parts = [Servers(lab, config.model.name, words, config.clients), Trainings(lab, words)]
    begin = time.monotonic()
    try:
        disturb(config, lab, parts, report, begin)
        report["unfinished"] = ""
    except Broken as broken:  # when the last process was to end well
        report["broken"].append({"fault": "the end", "what": str(broken)})
        report["unfinished"] = ""
    finally:
        lab.close()
        report |= {"minutes": round((time.monotonic() - begin) / 60, 1), "disk": "tmpfs" if lab.mounted else "limits"}
        report |= {"outcomes": dict(sum((part.counts for part in parts), Counter[str]()))}
        show(report, folder)
    if report["broken"] or not report["faults"]:
        raise SystemExit(1)


def disturb(config: ChaosConfig, lab: Any, parts: list[Any], report: dict[str, Any], begin: float) -> None:
    """Run faults round by round, each in another order, and add to the report what came of each."""
    from scripts.faults.lab import Broken

    named = [(part, *name) for part in parts for name in part.names()]
    chosen = [each for each in named if not config.faults or f"{each[1]}: {each[2]}".startswith(tuple(config.faults))]
    if not chosen:
        raise ValueError(f"faults={config.faults}: no fault begins so; there are {[f'{a}: {b}' for _, a, b in named]}")
    running = parts[0]
    for number in count():
        for part, kind, name in shuffled(chosen, lab.random) if number != config.rounds else []:
            if config.rounds is None and time.monotonic() > begin + 60 * config.minutes:
                return running.stop()
            row = report["faults"].setdefault(f"{kind}: {name}", {"runs": 0, "broken": 0})
            row["runs"] += 1
            before, since = Counter(part.counts), time.monotonic()
            try:
                if part is not running:
                    running.stop()
                    running = part
                part.run(kind, name)
                lab.check_logs()
                said = counted(part.counts - before)
            except Broken as broken:
                row["broken"] += 1
                said = f"BROKEN: {broken}"
                report["broken"].append({"fault": f"{kind}: {name}", "what": str(broken)})
                lab.end_all()
                running.forget()
            print(f"{kind}: {name}: {said or 'held'} ({time.monotonic() - since:.0f} s)", file=sys.stderr, flush=True)
        if number == config.rounds:
            return running.stop()


def shuffled(chosen: list[tuple[Any, str, str]], random: Random) -> list[tuple[Any, str, str]]:
    """Return the faults in a random order, those of one kind of process together."""
    kinds = sorted({kind for _, kind, _ in chosen})
    random.shuffle(kinds)
    return sorted(random.sample(chosen, len(chosen)), key=lambda each: kinds.index(each[1]))


def show(report: dict[str, Any], folder: Path) -> None:
    file = folder / "report.json"
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    width = max((len(name) for name in report["faults"]), default=0)
    for name, row in sorted(report["faults"].items()):
        print(f"{name:<{width}}  {row['runs']:>4} runs  {row['broken']:>3} broken")
    for each in report["broken"]:
        print(f"BROKEN: {each['fault']}: {each['what']}")
    runs, outcomes = sum(row["runs"] for row in report["faults"].values()), counted(report["outcomes"])
    print(f"{runs} faults in {report['minutes']} minutes, seed {report['seed']}: {outcomes}")
    incomplete = f"incomplete: {report['unfinished']}; " if report["unfinished"] else ""
    print(f"{len(report['broken'])} broken; {incomplete}report: {short(file)}", flush=True)


def counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))


if __name__ == "__main__":
    run_process(main)
