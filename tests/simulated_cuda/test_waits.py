"""In which steps of the engine the host waits for the device: where waits.txt says, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulated_cuda.machine import Machine
from tests.simulated_cuda.serving import waits_of
from tests.simulated_cuda.waits import CASES, TABLE, format_table, heading, lines, read_table


@pytest.mark.parametrize(("drafter", "graphs"), CASES)
def test_the_host_waits_where_the_table_says(cuda: Machine, target_folder: Path, drafter: str, graphs: str) -> None:
    title = heading(drafter, graphs)
    section = lines(waits_of(target_folder, cuda, drafter, graphs=graphs))
    expected = read_table(TABLE.read_text(encoding="utf-8")).get(title, [])
    new, gone = [line for line in section if line not in expected], [line for line in expected if line not in section]
    assert section == expected, (
        f"{title}: new {new}, gone {gone}. If that is meant, write {TABLE.name} anew by "
        "python -m tests.simulated_cuda.waits, or paste\n\n" + format_table({title: section})
    )


def test_the_table_has_no_other_sections() -> None:
    table = TABLE.read_text(encoding="utf-8")
    assert list(map(str, read_table(table))) != []
    assert set(read_table(table)) == {heading(*case) for case in CASES}
    assert format_table(read_table(table)) == table
