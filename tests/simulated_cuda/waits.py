"""The table of expected waits, waits.txt: in which steps the host waits for the device, where, and how often.

    [eagle3, graphs off]                          a drafter of matrix.py; several with equal waits share a section
    prompt: 1 read infer/steps/step.py ...        in a step that prefills: how often at most, how, in which function
    decode: ...                                   in a step that only decodes
    logprobs / grammar, decode: +2 read ...       more than that, or with a minus fewer, for these kinds of request

    [training, ttt]                               an objective's step: features, forward, backward and optimizer

The counts of serving are those of a batch of two requests. Written anew, in two minutes, by

    python -m tests.simulated_cuda.waits
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    os.environ.update(TRITON_INTERPRET="1", HF_HUB_OFFLINE="1")  # before anything imports triton

from tests.simulated_cuda.machine import Wait
from tests.simulated_cuda.matrix import DRAFTERS

TABLE = Path(__file__).with_name("waits.txt")
# Steps of the host, without graphs, are those of one drafter of each kind.
BY_HOST = (
    *("none", "ngram", "draft model", "combined", "eagle3", "eagle3, beam", "eagle3, adaptive", "mtp, beam", "mlp"),
    *("medusa, static", "p-eagle, beam", "dflash", "dspark, beam"),
)
CASES = [*((name, "off") for name in BY_HOST), *((name, "on") for name in DRAFTERS)]


def heading(drafter: str, graphs: str) -> str:
    return f"[{drafter}, graphs {graphs}]"


def training_heading(objective: str) -> str:
    return f"[training, {objective}]"


def lines(waits: dict[str, dict[str, Counter[Wait]]]) -> list[str]:
    """Return the lines of a section, from waits by kind of request and phase."""
    base, *others = waits
    kinds_of: dict[str, list[str]] = {}  # kinds of request by the difference that they make
    for kind in others:
        for phase, counts in waits[kind].items():
            more, fewer = counts - waits[base][phase], waits[base][phase] - counts
            for text in [*(f"+{text}" for text in facts(more)), *(f"-{text}" for text in facts(fewer))]:
                kinds_of.setdefault(f"{phase}: {text}", []).append(kind)
    return [
        *(f"{phase}: {text}" for phase, counts in waits[base].items() for text in facts(counts)),
        *(f"{' / '.join(kinds)}, {text}" for text, kinds in kinds_of.items()),
    ]


def facts(counts: Counter[Wait]) -> list[str]:
    return [f"{count} {wait.kind} {wait.place}" for wait, count in sorted(counts.items())]


def read_table(text: str) -> dict[str, list[str]]:
    """Return the lines of each section by its heading."""
    sections: dict[str, list[str]] = {}
    headings: list[str] = []
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            headings = [*headings, line] if headings and not sections[headings[-1]] else [line]
            sections[line] = []
        else:
            for one in headings:
                sections[one].append(line)
    return sections


def check(title: str, section: list[str]) -> None:
    """Assert that a section is as in the table; the message holds what to paste if not."""
    expected = read_table(TABLE.read_text(encoding="utf-8")).get(title, [])
    new, gone = [line for line in section if line not in expected], [line for line in expected if line not in section]
    assert section == expected, (
        f"{title}: new {new}, gone {gone}. If that is meant, write {TABLE.name} anew by "
        "python -m tests.simulated_cuda.waits, or paste\n\n" + format_table({title: section})
    )


def format_table(sections: dict[str, list[str]]) -> str:
    grouped: dict[tuple[str, ...], list[str]] = {}
    for title, body in sections.items():
        grouped.setdefault(tuple(body), []).append(title)
    return "\n".join("\n".join([*titles, *body]) + "\n" for body, titles in grouped.items())


def main() -> None:
    import tempfile

    from tests.simulated_cuda.install import simulated_cuda
    from tests.simulated_cuda.serving import CONTROL, waits_of
    from tests.simulated_cuda.targets import write_target
    from tests.simulated_cuda.training import OBJECTIVES, step_waits

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        target, sections = write_target(Path(folder) / "target"), {}
        for name, graphs in CASES:
            with simulated_cuda(computed=CONTROL) as machine:
                sections[heading(name, graphs)] = lines(waits_of(target, machine, name, graphs=graphs))
        for objective in OBJECTIVES:
            with simulated_cuda(computed=set()) as machine:
                sections[training_heading(objective)] = lines({"": step_waits(target, machine, objective)})
    TABLE.write_text(format_table(sections), encoding="utf-8")


if __name__ == "__main__":
    main()
