"""Judges the controller on simulated machines (tests/simulated_machine.py).

python -m tests.judge_controller [name of a cell, or a part of it]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.simulated_machine import (
    CHAT,
    CHAT1,
    CODE,
    CODE1,
    CONTENTS,
    GOOD,
    GPU,
    MACHINES,
    MIXED,
    SMOLLM2,
    TREE,
    USELESS,
    WIDE,
    Content,
    Machine,
    controlled,
    references,
)

TOKENS = {1: 4000, 4: 6000, 16: 8000, 64: 10000}  # by number of requests
LONG = {"prompt": 1000, "output": (90, 180)}


def cells() -> Iterator[tuple[str, Machine, Content, int, dict[str, Any]]]:
    """Yield what is special of each cell, machine, content, requests and options."""
    for machine in MACHINES:
        for content in (*CONTENTS, MIXED):
            for batch in (1, 4, 16, 64):
                if batch < 16 or content not in (CHAT1, CODE1):
                    yield "steady", machine, content, batch, {}
    for machine in (SMOLLM2, WIDE, GPU):
        dear, cheap = replace(machine, row=2 * machine.row), replace(machine, row=machine.row / 2)
        for batch in (1, 4):
            for content in (CHAT, CODE1, GOOD):
                yield "early exit", machine, content, batch, {"scored": True}
            for content in (CHAT1, CODE, GOOD):
                yield "tree", machine, content, batch, {"limit": TREE}
            for content in (CODE, USELESS):
                for slow in (0.55, 1.8):
                    yield f"profile of an hour x{slow}", machine, content, batch, {"slow": slow}
                yield "guess", machine, content, batch, {"guess": True}
            for content in (CHAT, CODE):
                yield "rows cost twice the profile's", machine, content, batch, {"profiled": cheap}
                yield "rows cost half the profile's", machine, content, batch, {"profiled": dear}
                yield "drafts cost the target 10 %", replace(machine, beside=0.1 * machine.step), content, batch, {}
            yield "long context", replace(machine, context=3.0), CODE, batch, LONG
        for batch in (16, 64):
            for content in (CODE, USELESS):
                yield "profile up to 4 requests", machine, content, batch, {"sizes": [1, 2, 4]}


def main() -> None:
    print("| | machine | content | requests | best fixed of plain | auto of plain | of the best | steps with drafts |")
    print("|---|---|---|---|---|---|---|---|")
    for special, machine, content, batch, options in cells():
        names = [special, machine.name, content.name, str(batch)]
        if " ".join(sys.argv[1:]) not in " ".join(names):
            continue
        same = {key: options[key] for key in ("limit", "prompt", "output") if key in options}
        plain, best = references(machine, content, batch, TOKENS[batch], **same)
        seen = controlled(machine, content, batch, **options).run(TOKENS[batch])
        ratios = (best / plain, seen.speed / plain, seen.speed / best, seen.drafted)
        print("|", " | ".join([*names, *(f"{ratio:.3f}" for ratio in ratios)]), "|", flush=True)


if __name__ == "__main__":
    main()
