"""Compiles the kernels of the checks in processes that share the cores, before the checks run.

Each process launches every kernel of its share and compares nothing; afterwards Triton's cache on disk holds the
variants. A process that dies takes its share along and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infer.options.paths import REPO_ROOT
from scripts.gpu_check import plan

SECONDS = 120  # that all processes together may take on a GPU
EXPECTED = 40  # that they take with 16 cores
KEPT = 2000  # characters of what a process wrote to stderr


def compile_kernels(
    command: Sequence[str], workers: int, limit: float | None, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run `workers` processes, each `command` with --share I/N, and return what the report says of compiling."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{index}.jsonl" for index in range(workers)]
        processes = []
        for index, file in enumerate(files):
            words = [*command, "--share", f"{index}/{workers}"]
            with file.open("w") as out, errors_of(file).open("w") as errors:
                process = subprocess.Popen(words, stdout=out, stderr=errors, cwd=REPO_ROOT, env=environment)
                processes.append(process)
        for process in processes:
            left = None if limit is None else max(0.0, limit - (time.monotonic() - begin))
            try:
                process.wait(left)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        outcomes = [read_share(file, process.returncode) for file, process in zip(files, processes, strict=True)]
    variants = {variant for share in outcomes for variant in share["variants"]}
    return {
        "processes": workers,
        "seconds": round(time.monotonic() - begin, 1),
        "variants": dict(Counter(variant.split()[0] for variant in sorted(variants))),  # by kernel
        "failures": [failure for share in outcomes for failure in share["failures"]],
        "unfinished": [share["unfinished"] for share in outcomes if share["unfinished"]],
    }


def errors_of(file: Path) -> Path:
    """Return the file of a process's stderr, beside that of its results."""
    return file.with_suffix(".err")


def read_share(file: Path, code: int) -> dict[str, Any]:
    """Read what a process wrote: variants compiled, failures, and the check in which it ended too early, with the end
    of its stderr.
    """
    lines: list[dict[str, Any]] = []
    for text in file.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # cut off, or printed by a library
            lines.append(json.loads(text))
    ended = {line["label"] for line in lines if "variants" in line}
    begun = [line["label"] for line in lines if line["label"] not in ended]
    unfinished = None
    if code:
        said = errors_of(file).read_text(encoding="utf-8", errors="replace")[-KEPT:]
        unfinished = f"{begun[0] if begun else 'not in a check'} (exit code {code}): {said}".removesuffix(": ")
    return {
        "variants": [variant for line in lines for variant in line.get("variants", ())],
        "failures": [f"{line['label']}: {line['failure']}" for line in lines if line.get("failure")],
        "unfinished": unfinished,
    }


def compile_share(share: str, device: torch.device, options: argparse.Namespace) -> None:
    """Launch the kernels of share I/N of a group; print a line of JSON before and after each check, for `read_share`.

    `options` are those of the command line.
    """
    index, count = map(int, share.split("/"))
    groups = plan.groups(options.only, device, options)
    checks = [check for group in groups if group.name == options.group for check in group.compiled]
    if device.type != "cuda":
        checks = checks[:count]  # the interpreter compiles nothing: one shows that this works
    for check in checks[index::count]:
        print(json.dumps({"label": check.label}), flush=True)
        failure = None
        with variants_compiled() as variants:
            try:
                check.compile()
            except Exception as error:  # whatever else is wrong, the check itself will report
                failure = describe(error) if is_compile_failure(error) else None
        print(json.dumps({"label": check.label, "variants": sorted(variants), "failure": failure}), flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


@contextlib.contextmanager
def variants_compiled() -> Iterator[set[str]]:
    """Collect "<kernel> <hash>" of every variant compiled, or found in Triton's cache, within the block."""
    from triton import knobs

    variants: set[str] = set()

    def listen(*, src: Any, metadata: dict[str, Any], **other: Any) -> None:
        variants.add(f"{src.name} {metadata['hash']}")

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        yield variants
    finally:
        knobs.compilation.listener = before


def is_compile_failure(error: BaseException) -> bool:
    """Return whether Triton could not make a kernel's code, or the GPU cannot hold it."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    if isinstance(error, CompilationError | OutOfResources | PTXASError) or "PassManager::run failed" in str(error):
        return True
    return error.__cause__ is not None and is_compile_failure(error.__cause__)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"
