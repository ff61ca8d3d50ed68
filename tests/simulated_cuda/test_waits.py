"""In which steps the host waits for the device: where waits.txt says, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pairwise import parametrize_each
from tests.simulated_cuda.install import simulated_cuda
from tests.simulated_cuda.machine import Machine
from tests.simulated_cuda.serving import waits_of
from tests.simulated_cuda.training import OBJECTIVES, step_waits
from tests.simulated_cuda.waits import CASES, TABLE, check, format_table, heading, lines, read_table, training_heading


@pytest.mark.parametrize(("drafter", "graphs"), CASES)
def test_a_step_waits_where_the_table_says(cuda: Machine, target_folder: Path, drafter: str, graphs: str) -> None:
    check(heading(drafter, graphs), lines(waits_of(target_folder, cuda, drafter, graphs=graphs)))


@parametrize_each({"objective": list(OBJECTIVES), "device": ["cuda:0", "cuda:1"]})
def test_training_waits_where_the_table_says(target_folder: Path, objective: str, device: str) -> None:
    with simulated_cuda(computed=set()) as machine:
        machine.current = int(device[-1])
        check(training_heading(objective), lines({"": step_waits(target_folder, machine, objective, device)}))


def test_the_table_has_no_other_sections() -> None:
    table = TABLE.read_text(encoding="utf-8")
    sections = read_table(table)
    assert set(sections) == {heading(*case) for case in CASES} | set(map(training_heading, OBJECTIVES))
    assert format_table(sections) == table
    assert all(sections.values())
