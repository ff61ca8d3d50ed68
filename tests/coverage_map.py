"""Writes docs/coverage.md: what the tests show to be equal, from what they were seen to do (tests/observed.py).

    python -m tests.coverage_map            # writes the page
    python -m tests.coverage_map --check    # only says by its exit code, 1, if something would change

Rows and columns are read from the registries of the product: heads, proposers, targets, sampling parameters, options. A
cell names tests in which that row and that column met, and drafts were compared with plain decoding. What is refused is
asked for, and the error printed.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from infer.batch.params import SamplingParams
from infer.config import PROPOSERS, EngineConfig, ProposerConfig
from infer.settings.paths import REPO_ROOT
from models.heads import HEADS
from models.targets import ARCHITECTURES
from scripts.benchmarks.document import RESULTS, markdown
from tests.kernels.test_lower_levels import LEVELS, MODELS
from tests.observed import FUNCTIONS, Setting, function_of, read

PAGE = REPO_ROOT / "docs" / "coverage.md"
MOST = 2  # tests that a cell names
SERVED = "draft-model-served"
COPIES = {"ngram": "n-gram lookup", "suffix": "suffix decoding", "combined": "combined"}
DRAFTERS: dict[str, tuple[str, ...]] = {
    **{f"{name} head": (name,) for name in HEADS},
    **{label: (name,) for name, label in COPIES.items()},
    "draft model": (SERVED,),
    "with another tokenizer": (f"{SERVED}-other-tokenizer",),
    "in parallel": (f"{SERVED}-parallel", f"{SERVED}-parallel-other-tokenizer"),
    "with recurrent layers": (f"{SERVED}-hybrid",),
    "made-up drafts": ("oracle", "thicket", "scripted"),
}
# of PROPOSERS, where the page has them beside those of COPIES
PLACES = {
    "head": "a row per kind",
    "draft_model": "four rows",
    "auto": "a head or suffix decoding, in the column *planned*",
    "none": "plain decoding, with which all are compared",
    "synthetic": "gives the promise up",
}
SITUATIONS = {
    "greedy": "greedy", "seeded": "seeded", "chain": "chain", "tree": "tree", "accepted": "accepted",
    "rejected": "rejected", "batch": "in a batch", "arrival": "arrival", "chunks": "chunks", "cached": "prefix hit",
    "preempted": "pre-empted", "p:n": "n > 1", "p:grammar": "grammar", "p:tools": "tools", "planned": "planned",
    "graphs": "graphs", "ranks": "ranks",
}  # fmt: skip
OF_TARGETS = ("greedy", "seeded", "chain", "tree", "batch", "chunks", "cached", "preempted", "ranks")
CLASSES: dict[str, Callable[[Setting, set[str]], bool]] = {
    "head, chain": lambda setting, facts: setting.drafter in HEADS and "chain" in facts,
    "head, tree": lambda setting, facts: setting.drafter in HEADS and "tree" in facts,
    **{label: lambda setting, facts, name=name: setting.drafter == name for name, label in COPIES.items()},
    "draft model": lambda setting, facts: setting.drafter.startswith(SERVED),
}
KERNELS = {
    "c": "CPU, kernels in C",
    "torch": "CPU without a C compiler",
    "triton": "Triton's interpreter",
    "cuda": "simulated CUDA",
}
LOWEST = f"CPU at the level {LEVELS[0]}"
GPU_WAYS = [
    f"{drafts}, graphs {graphs}" for graphs in ("on", "off") for drafts in ("head, chain", "head, tree", "n-gram")
]
DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = ("int8", "fp8", "int4", "stored")
# What cannot be: a chain's proposer drafts no tree, and so on. A record to the contrary fails.
NOTHING = {
    **{(name, "tree"): "drafts chains" for name in ("n-gram lookup", "suffix decoding")},
}
LOSSY = {
    "acceptance": "`block` and `typical`", "posterior_threshold": "of `typical`", "posterior_alpha": "of `typical`",
}  # fmt: skip
# options that change the text, and what for; the others of these groups change no token
GIVES_UP = {
    "engine.exact": ("false", "the bits of a row depend on its batch", "speed: libraries' matrix products"),
    "engine.weights": ("int8, fp8, int4", "another target, of rounded weights", "memory and speed"),
    "engine.activations": ("int8, auto", "inputs of layers are rounded to 8 bits", "speed"),
    "engine.kv_dtype": ("fp8", "keys and values are rounded to 8 bits", "memory"),
    "proposer.acceptance": ("block, typical", "block: the ids, not their distribution; typical: both", "τ"),
    "proposer.name": ("synthetic", "accepts at given rates, right or wrong", "measurements"),
}
ROUNDS = "engine.threads"  # otherwise, with drafts and without alike
CHANGES_NOTHING = {
    "engine": """page_size max_tokens_in_cache max_batch prefill_chunk max_rows prefix_cache head_weights draft_weights
        graphs tensor_parallel memory_share max_model_len seed""",
    "proposer": """adaptive max_draft_tokens tree candidates draft_model draft_model_revision parallel_drafting
        posterior_threshold posterior_alpha sources prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth
        suffix_decoding_max_spec_factor suffix_decoding_min_token_prob suffix_decoding_max_cached_requests memory""",
}
REFUSED: dict[str, Callable[[], object]] = {
    "CUDA graphs and tensor parallel": lambda: EngineConfig(graphs="on", tensor_parallel=2),
    "integer activations on weights of 16 bits": lambda: EngineConfig(activations="int8", weights="widened"),
    "integer activations on 8-bit floats": lambda: EngineConfig(activations="int8", weights="fp8"),
    "a measured tree of a draft model": lambda: ProposerConfig(
        name="draft_model", draft_model="small", tree="measured"
    ),
    "a rule that nobody knows": lambda: SamplingParams(acceptance="greedy"),  # pyright: ignore
    "rates where a rule is meant": lambda: ProposerConfig(name="head", acceptance="0.7"),
}
# The other promises of README.md, and tests that would fail if they did not hold
PROMISES = {
    "training and serving compute the same logits of a head": (
        "lossless/test_head_parity.py::test_trainer_logits_equal_the_engines"
    ),
    "the acceptance that training reports is the engine's": (
        "train/test_acceptance.py::test_simulated_acceptance_equals_the_engines"
    ),
    "a conversation is the same prompt in both": (
        "server/test_same_prompt.py::test_a_prompt_is_the_same_in_serving_and_in_training"
    ),
    "no library is told to run a model's code": ("unit/test_layout.py::test_no_code_from_data"),
    "a pickle of more than tensors is refused and runs nothing": (
        "formats/test_bad_input.py::test_a_pickle_of_anything_else_is_refused_and_runs_nothing"
    ),
    "on simulated machines drafts are never slower": (
        "unit/test_controller.py::test_never_slower_than_plain_and_about_as_fast_as_the_best_fixed_plan"
    ),
    "an exception at any stage ends one request": (
        "lossless/test_isolation.py::test_a_failure_at_any_stage_is_one_request_s"
    ),
    "a dead engine ends its process": ("server/test_process.py::test_a_dead_engine_ends_the_process"),
}


class Tests:
    """Numbers of tests, in the order in which the page names them."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def cell(self, functions: Iterable[str]) -> str:
        """Return the numbers of up to MOST of these tests; those that have one already come first."""
        found = sorted(set(functions), key=lambda name: (name not in self.numbers, self.numbers.get(name, 0), name))
        numbers = [self.numbers.setdefault(name, len(self.numbers) + 1) for name in found[:MOST]]
        return " ".join(map(str, numbers))


@cache
def events() -> list[tuple[str, Setting, set[str]]]:
    """Return what was seen: a test function, who drafted for what, and what happened."""
    record = read()
    return [(function_of(test), *use) for test, uses in record.items() for use in uses.items()]


def where(holds: Callable[[Setting, set[str]], bool]) -> list[str]:
    return [function for function, setting, facts in events() if holds(setting, facts)]


def table(tests: Tests, corner: str, rows: Mapping[str, Any], columns: Mapping[str, Any], cell: Any) -> str:
    """Return a table; `cell(row, column)` is a condition on what was seen, or what stands there."""
    lines = []
    for row in rows:
        line = [row]
        for column in columns:
            made = cell(row, column)
            line.append(made if isinstance(made, str) else tests.cell(where(made)) or "=")
        lines.append(line)
    return markdown([corner, *columns.values()], lines)


def by_drafter(tests: Tests) -> str:
    def cell(row: str, column: str) -> Any:
        if (row, column) in NOTHING:
            return "–"
        return lambda setting, facts: setting.drafter in DRAFTERS[row] and column in facts

    return table(tests, "", DRAFTERS, SITUATIONS, cell)


def by_parameter(tests: Tests) -> str:
    names = {f"`{field.name}`": field.name for field in fields(SamplingParams)}

    def cell(row: str, column: str) -> Any:
        name = names[row]
        if name in LOSSY:
            return "gives up"
        return lambda setting, facts: f"p:{name}" in facts and CLASSES[column](setting, facts)

    return table(tests, "parameter", names, {name: name for name in CLASSES}, cell)


def by_target(tests: Tests) -> str:
    columns = {name: SITUATIONS.get(name, name) for name in (*OF_TARGETS, *DTYPES)} | {"mtp": "its MTP head"}

    def cell(row: str, column: str) -> Any:
        def holds(setting: Setting, facts: set[str]) -> bool:
            return setting.target == row and (column in facts or column in (setting.dtype, setting.drafter))

        return holds

    return table(tests, "architecture", ARCHITECTURES, columns, cell)


def by_device(tests: Tests) -> str:
    columns = {name: name for name in (*DTYPES, *WEIGHTS)}
    columns |= {"stored": "GGUF blocks, GPTQ groups", "int8-activations": "integer activations", "fp8 KV": "fp8 KV"}
    lower = {function for function in FUNCTIONS if function.partition("::")[0] in MODELS}

    def cell(row: str, column: str) -> Any:
        def holds(setting: Setting, facts: set[str]) -> bool:
            weights, _, activations = setting.weights.partition("+")
            of = {setting.dtype, weights, activations, f"{setting.kv} KV"}
            return column in of and (row == LOWEST or KERNELS[setting.kernels] == row)

        if row == LOWEST:
            functions = [name for name in where(holds) if name in lower]
            return tests.cell(functions) or "="
        return holds

    rows = [KERNELS["c"], LOWEST, *(name for key, name in KERNELS.items() if key != "c")]
    return table(tests, "", dict.fromkeys(rows), columns, cell)


def on_gpu() -> str:
    """Return what reports of scripts/gpu_check.sh say of token ids, by target and way."""
    seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file in sorted(RESULTS.glob("gpu-check-*.json")):
        report = json.loads(file.read_text(encoding="utf-8"))
        for line in report.get("exact", []):
            drafted = "equal" if line["ok"] and line["accepted_drafts"] else "no draft accepted"
            seen[line["target"]][f"{line['drafts']}, graphs {line['graphs']}"].add(drafted)
        for failure in report.get(
            "failures", []
        ):  # exact: TARGET, DRAFTS, prompts together, graphs on, SAMPLING: ERROR
            for way in GPU_WAYS:
                drafts, graphs = way.split(", graphs ")
                if said := re.match(rf"exact: (.*), {drafts}, prompts \w+, graphs {graphs},", failure):
                    seen[said[1]][way].add("failed")
    results = ("failed", "equal", "no draft accepted")
    rows = [
        [target, *(next((each for each in results if each in ways[way]), "not run") for way in GPU_WAYS)]
        for target, ways in seen.items()
    ]
    return markdown(["target", *GPU_WAYS], rows)


def refusal(ask: Callable[[], object]) -> str:
    try:
        ask()
    except ValueError as error:
        return str(error).replace("|", "\\|")
    raise AssertionError("is not refused: correct REFUSED")


def refused() -> str:
    return markdown(["what", "the error"], [[what, f"`{refusal(ask)}`"] for what, ask in REFUSED.items()])


def gives_up() -> str:
    rows = [[f"`{key}`", *words] for key, words in GIVES_UP.items()]
    return markdown(["option", "values", "what changes", "for"], rows)


def unclassified() -> list[str]:
    """Return the options and names that the page has no place for, or that exist no longer."""
    groups = {"engine": EngineConfig, "proposer": ProposerConfig}
    options = {f"{group}.{field.name}" for group, schema in groups.items() for field in fields(schema)}
    placed = {f"{group}.{name}" for group, names in CHANGES_NOTHING.items() for name in names.split()}
    return sorted(options ^ (placed | set(GIVES_UP) | {ROUNDS})) + sorted(set(PROPOSERS) ^ set(PLACES | COPIES))


def named(tests: Tests) -> str:
    record, lines = read(), []
    cases = {name: sum(function_of(test) == name and bool(uses) for test, uses in record.items()) for name in FUNCTIONS}
    for name, number in sorted(tests.numbers.items(), key=lambda item: item[1]):
        file = name.removeprefix("tests/").partition("::")[0]
        lines.append([str(number), linked(name), f"`{file}`", str(cases[name])])
    return markdown(["", "test", "file", "cases"], lines)


def linked(test: str) -> str:
    file, _, function = test.removeprefix("tests/").partition("::")
    return f"[{function}](../tests/{file})"


def page() -> str:
    tests = Tests()
    options = ", ".join(f"`{group}.{name}`" for group, names in CHANGES_NOTHING.items() for name in names.split())
    places = "; ".join(f"`{name}`: {place}" for name, place in PLACES.items())
    return f"""# What is shown to be equal

Which proposers, parameters, situations, targets, dtypes and devices met in a test that compares token ids with drafts
and without. `python -m tests.coverage_map` writes this page. What a cell says was seen: in these tests every engine is
watched, and `tests/coverage.txt` keeps who drafted for what, and what happened. A test that no longer does what stands
there fails, and the suite fails if this page is not what the record says, or has no place for a head, proposer, target,
parameter or option. [A certificate](prove.md) shows the same on your own model and machine.

| a cell | says |
|---|---|
| numbers | equal by test: at most {MOST} of the [tests](#tests) in which row and column met |
| = | equal by construction, not run: [the rule](../infer/README.md#why-no-token-changes) knows no proposer |
| – | there is no such thing |
| gives up | changes the text, [for something else](#what-gives-the-promise-up) |

## Proposers

Of `proposer=`, {places}.

{by_drafter(tests)}
*Planned*: drafted as far as costs and acceptance say, per step and request. *Graphs*: on the buffers of CUDA graphs,
replayed on a CPU. *Arrival*: added while others decode. *Ranks*: two tensor parallel processes. *Made-up drafts* hold
what plain decoding said, cut and mixed with wrong tokens at random.

## Sampling parameters

Of a request that has the parameter, and for which the proposer drafted.

{by_parameter(tests)}
## Targets

{by_target(tests)}
## Devices and dtypes

Kernels are compared with their oracles for themselves, at every level of processor and in Triton's interpreter
(`tests/kernels/`). Columns from int8 on are of weights, but for the last two.

{by_device(tests)}
### On a GPU

From the reports of `scripts/gpu_check.sh` on an H100 (`scripts/results/`). Trees in CUDA graphs failed by a fault that
was mended since; no report is newer. Here nothing counts as equal by construction.

{on_gpu()}
## What is refused

{refused()}
## What gives the promise up

All of it is off unless said. With rounded weights, activations or KV it is another target, of which drafts change no
token either, as the tables above show.

{gives_up()}
`{ROUNDS}` may round otherwise, with drafts and without alike. These change no token: {options}.

## Other promises

Of [README.md](../README.md#what-is-promised), beside the first.

{markdown(["promise", "test"], [[promise, linked(test)] for promise, test in PROMISES.items()])}
## Tests

With the number of their cases in which something was drafted.

{named(tests)}"""


def main() -> None:
    text = page()
    if "--check" in sys.argv[1:]:
        sys.exit(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
