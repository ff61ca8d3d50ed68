"""How much code a drafted decode step enters: what a newcomer reads to understand one."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.confidence import Confidence
from infer.speculation.control.cost_model import CostModel, CostTable, Curve
from infer.speculation.control.planner import Controller, Planner
from models.heads.files import load_head
from models.targets import load_target

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("infer", "kernels", "models")
MOST_FILES, MOST_LINES = 29, 1_269  # of one step with fixed chains; 28 and 1,100 are meant
MOST_DEFAULT_FILES, MOST_DEFAULT_LINES = 38, 1_953  # of 60 as the commands run them; 33 and 1,500 are meant


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


def make_engine(target_folder: Path, head_folder: Path, **drafts: Any) -> Engine:
    """Return an engine on a CPU whose clock shows another millisecond at every look, with two requests that decode."""
    target = load_target(str(target_folder))
    engine = Engine(
        target,
        head=load_head(head_folder, target=target),
        proposer="head",
        config=EngineConfig(threads=1),
        proposer_config=ProposerConfig(name="auto", max_draft_tokens=3, **drafts),
        timer=itertools.count(0.0, 1e-3).__next__,
        probe=False,
        profile=False,
    )
    for prompt in ([3, 1, 4, 1, 5], [2, 7, 1, 8]):
        engine.add(prompt, SamplingParams(max_tokens=400, ignore_eos=True))
    for _ in range(3):
        engine.step()
    return engine


def check(codes: set[CodeType], most_files: int, most_lines: int) -> None:
    lines = lines_by_file(codes)
    total = sum(map(len, lines.values()))
    listing = "\n".join(f"{len(numbers):5} {file}" for file, numbers in sorted(lines.items()))
    report = f"{len(lines)} files, {total} lines\n{listing}"
    assert len(lines) <= most_files, report
    assert total <= most_lines, report


def test_a_step_is_read_in_an_hour(tiny_target_folder: Path, tiny_head_folder: Path) -> None:
    """A chain of an EAGLE-3 head for each of two requests; on failure the files are listed."""
    engine = make_engine(tiny_target_folder, tiny_head_folder)
    assert type(engine.speculator.planner) is Planner
    with entered_functions() as codes:
        outputs = engine.step()
    assert [output.stats.drafted > 0 for output in outputs] == [True, True]
    check(codes, MOST_FILES, MOST_LINES)


def test_so_are_sixty_steps_as_the_commands_run_them(tiny_target_folder: Path, tiny_head_folder: Path) -> None:
    """The planner decides what is drafted: with and without drafts, with plans, early exits and probes."""
    engine = make_engine(tiny_target_folder, tiny_head_folder, adaptive=True)
    acceptance = AcceptanceModel({"head": [0.9, 0.8, 0.7]})
    steps, drafts = Curve((1.0, 8.0), (6e-3, 7e-3)), Curve((1.0, 3.0), (1e-4, 3e-4))
    confidence = engine._head.confidence = Confidence(acceptance)  # type: ignore[union-attr]
    engine.speculator.planner = Controller(
        CostModel(CostTable((1,), (steps,), {"head": (drafts,)})), acceptance, confidence
    )
    drafted, stats = set[bool](), engine.stats
    with entered_functions() as codes:
        for _ in range(60):
            before = stats.speculation.drafted
            assert len(engine.step()) == 2
            drafted.add(stats.speculation.drafted > before)
    assert drafted == {True, False}
    check(codes, MOST_DEFAULT_FILES, MOST_DEFAULT_LINES)
