"""Proves on your own model that drafts change no token, and measures whether they are slower.

    python scripts/prove.py model=smollm2-135m
    python scripts/prove.py model=owner/name head=eagle3 minutes=30 files=[prompts.jsonl]
    python scripts/prove.py model=smollm2-135m repeat=outputs/proofs/smollm2-135m/case-1.json
    python scripts/prove.py servers=[http://127.0.0.1:8000,http://127.0.0.1:8001]

docs/prove.md says what is compared and how to read the certificate, which is written to <output_dir>/proofs/<model>/ as
JSON and as a page. Exit code 1: something differs, or nothing is shown. Ctrl-C leaves the certificate of what was done.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import json
import shlex
import time
from pathlib import Path
from typing import Any

from infer.options.cli import engine_entry_point
from infer.processes.process_end import run_process
from infer.settings.paths import resolve_path, short
from scripts.proof.config import ProveConfig

CELLS_SHARE = 0.6  # of the minutes; what is left is for acceptance and speed
MOST_FAULTS = 3  # cells that differ, after which no further one is run


def run(config: ProveConfig) -> None:
    begin = time.monotonic()
    if config.servers:
        from scripts.proof.servers.asking import ask_servers

        return ask_servers(config, begin + 60 * config.minutes)
    print(f"loading {config.model.name} ...", file=sys.stderr, flush=True)
    # Imports that take seconds come only now, so that a mistake above is reported at once.
    from tqdm import tqdm

    from scripts.proof.certificate import EQUAL, Certificate, identify
    from scripts.proof.engines import Engines

    engines = Engines(config)
    if config.repeat is not None:
        return repeat(config.repeat, engines)
    folder = resolve_path(config.output_dir) / "proofs" / config.model.name
    folder.mkdir(parents=True, exist_ok=True)
    certificate = Certificate(config, identify(config, engines))
    try:
        with tqdm(unit="cell", disable=None, dynamic_ncols=True) as bar:
            certificate.unfinished = prove(certificate, engines, folder, begin, bar)
    except KeyboardInterrupt:
        certificate.unfinished = "it was interrupted"
        raise
    finally:
        write(certificate, folder)
    if certificate.faults or not certificate.counted(EQUAL):
        raise SystemExit(1)


def prove(certificate: Any, engines: Any, folder: Path, begin: float, bar: Any) -> str:
    """Fill the certificate part by part; return why parts are missing, "" if none is."""
    from scripts.proof.acceptance import measure_acceptance
    from scripts.proof.matrix import ATTEMPTS, LENGTH, cover, uncovered
    from scripts.proof.mix import digest, read_mix
    from scripts.proof.speed import measure_speed, speed_table

    config = certificate.config
    prompts = read_mix(config, engines.tokenizer, engines.context // 2 - ATTEMPTS * LENGTH)
    of = "files" if config.files else "the built-in mix"
    certificate.prompts = {"count": len(prompts), "of": of, "sha256": digest(prompts)}
    certificate.not_covered = uncovered(engines)
    cells = list(cover(config.requests, list(certificate.not_covered)))
    until = None if config.cells else begin + 60 * config.minutes
    run_cells(certificate, engines, prompts, cells, until and begin + CELLS_SHARE * (until - begin), folder, bar)
    if certificate.faults:
        return "acceptance and speed are not measured where a cell differs"
    bar.set_description("acceptance")
    certificate.acceptance = measure_acceptance(engines, prompts)
    chain = certificate.acceptance.get("chain", {"missed": 0.0, "fault": None})
    certificate.faults += [chain["fault"]] if chain["fault"] else []
    certificate.speed = speed_table(measure_speed(engines, prompts, until, bar.set_description), chain["missed"])
    parted = (each for each in certificate.speed if not each["identical"])
    certificate.faults += [f"speed, {each['drafts']}, {each['requests']} requests: other ids" for each in parted]
    return ""


def run_cells(
    certificate: Any, engines: Any, prompts: Any, cells: list[Any], until: float | None, folder: Path, bar: Any
) -> None:
    """Compare cell by cell, until a number of them, of faults, or the time is reached; name those that are left."""
    from scripts.proof.certificate import IDLE, verdict_of
    from scripts.proof.matrix import ATTEMPTS, make_case
    from scripts.proof.shrinking import shrink
    from scripts.proof.situations import Kit

    config, bar.total = certificate.config, len(cells[: certificate.config.cells])
    kit, left = Kit(engines.tokenizer, config.engine.page_size, config.seed), ""
    for number, cell in enumerate(cells):
        left = "the time was up" if until is not None and time.monotonic() > until else left
        left = "more cells than were asked for" if number == config.cells else left
        if left:
            certificate.not_covered[str(cell)] = left
            continue
        bar.set_description(str(cell))
        for attempt in range(ATTEMPTS):
            case = make_case(cell, prompts, kit, number, attempt)
            difference, counts = engines.compare(case)
            if verdict_of(cell, difference, counts)[0] != IDLE:
                break
        again = None
        if difference is not None:
            case, difference = shrink(case, difference, lambda smaller: engines.compare(smaller)[0])
            case.save(file := folder / f"case-{number}.json")
            words = [word for word in sys.argv[1:] if not word.startswith(("cells=", "minutes="))]
            again = shlex.join(["python", "scripts/prove.py", *words, f"repeat={short(file)}"])
            bar.write(f"DIFFERENT: {cell}\n  again: {again}", sys.stderr)
        certificate.add(cell, difference, counts, again)
        left = f"{MOST_FAULTS} cells differ" if len(certificate.faults) == MOST_FAULTS else ""
        bar.update()


def repeat(file: str, engines: Any) -> None:
    from scripts.proof.cases import Case

    case = Case.load(resolve_path(file))
    difference, counts = engines.compare(case)
    print(f"{len(case.asks)} requests, {case.drafts}: {difference or 'equal to plain decoding'}")
    print(", ".join(f"{count} {name}" for name, count in counts.items() if count))
    if difference is not None:
        raise SystemExit(1)


def write(certificate: Any, folder: Path) -> None:
    from scripts.proof.page import page

    record = certificate.record()
    (folder / "certificate.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "certificate.html").write_text(page(record), encoding="utf-8")
    for line in [f"DIFFERENT: {fault}" for fault in certificate.faults] + [
        each["why_slower"] for each in record["speed"]
    ]:
        if line:
            print(line)
    print(f"{certificate.verdict}\ncertificate: {short(folder / 'certificate.html')} and .json", flush=True)


main = engine_entry_point("prove", ProveConfig)(run)

if __name__ == "__main__":
    run_process(main)
