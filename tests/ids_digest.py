"""Computes digests of emitted token ids and draft counts for every proposer, to compare before and after a refactoring.

    python -m tests.ids_digest --save before.json
    python -m tests.ids_digest --compare before.json
    python -m tests.ids_digest --model demo --head outputs/heads/demo/eagle3

A cell is a combination of proposer (none, n-gram, suffix, chain and tree of the head, draft model, combined),
temperature (0 or 1), concurrency (one or eight requests) and dtype (fp32 or bf16). Its `ids` is the SHA-256 of all
token ids, its `drafts` that of the numbers of tokens drafted and accepted at each depth of every request. The draft
model is the target itself. Digests may differ between machines, because products of another width round differently.
With --compare the exit code is 1 if any digest differs. Within one dtype and temperature all `ids` must be equal, else
speculation changed a token: the exit code is then 1 as well.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.engine import Engine
from infer.options.model_names import read_model
from infer.request import Completion, SamplingParams
from models.heads import DEFAULT_HEAD
from scripts.errors import command_line, reports_errors
from train.storage.atomic import free_disk

PROMPTS = (
    "def read(path):\n    with open(path) as file:\n",
    "import os\nimport sys\n\nclass Error(Exception):\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,",
    "Explain why the sky is blue in two sentences.",
    "for name in names:\n    if name not in seen:\n        seen.add(name)\n",
    "Once upon a time there was a king who had three daughters, and",
    "    def __init__(self, name, value):\n        self.name = name\n        self.value =",
)
TREE = {"tree": "beam:3x4:10"}
DRAFTS = {
    "none": ("none", {}),
    "ngram": ("ngram", {}),
    "suffix": ("suffix", {}),
    "head chain": ("head", {}),
    "head tree": ("head", TREE),
    "draft model": ("draft_model", {}),
    "combined": ("combined", {}),
}

Cells = dict[str, dict[str, str]]  # by the cell's name: its "ids" and "drafts"


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def digests(completions: Sequence[Completion]) -> dict[str, str]:
    stats = [(one.stats.drafted_by_position, one.stats.accepted_by_position) for one in completions]
    return {"ids": digest([completion.token_ids for completion in completions]), "drafts": digest(stats)}


def run(model: ModelConfig, head: str, *, max_tokens: int, dtypes: Sequence[str]) -> Iterator[Cells]:
    """Yield the cells one at a time."""
    for dtype in dtypes:
        shape = {"adaptive": False, "max_draft_tokens": 4, "draft_model": model.path}
        engine = Engine.load(
            replace(model, dtype=dtype),
            head=head,
            engine=EngineConfig(max_batch=8, head_weights="same", draft_weights="same"),
            proposer=ProposerConfig(name="combined", **shape),
        )
        for name, (proposer, tree) in DRAFTS.items():
            engine.set_proposer(proposer, config=ProposerConfig(name=proposer, **shape, **tree))
            for temperature in (0.0, 1.0):
                params = [
                    SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=True)
                    for seed in range(len(PROMPTS))
                ]
                for requests in (1, len(PROMPTS)):
                    completions = engine.generate(PROMPTS, params, max_concurrency=requests)
                    yield {f"{name}, T = {temperature:g}, {requests} at a time, {dtype}": digests(completions)}
        engine.close()


def unequal(cells: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the cells whose token ids are not those of plain decoding at the same dtype and temperature."""
    expected: dict[tuple[str, str], str] = {}
    wrong = []
    for name, value in cells.items():
        _, temperature, _, dtype = name.split(", ")
        first = expected.setdefault((temperature, dtype), value["ids"])
        if value["ids"] != first:
            wrong.append(f"{name}: other token ids than plain decoding")
    return wrong


def differing(before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]) -> list[str]:
    names = [*after, *(name for name in before if name not in after)]
    return [
        f"{name}: {part} differ"
        for name in names
        for part in ("ids", "drafts")
        if before.get(name, {}).get(part) != after.get(name, {}).get(part)
    ]


@reports_errors
def main(argv: list[str]) -> int:
    from tqdm import tqdm

    parser = command_line("", __doc__)
    parser.prog = "python -m tests.ids_digest"
    parser.add_argument("--model", default="smollm2-135m", help="as in model= (default: %(default)s)")
    parser.add_argument("--head", default=DEFAULT_HEAD, help="as in head=, or a folder (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="of every answer (default: %(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="(default: both)")
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="what --save wrote")
    args = parser.parse_args(argv)
    if args.save is not None:
        free_disk(args.save)  # refuses a place that cannot be written
    cells: Cells = {}
    before = None if args.compare is None else read(args.compare)
    parts = run(read_model(args.model), args.head, max_tokens=args.tokens, dtypes=args.dtypes)
    for part in tqdm(parts, total=4 * len(DRAFTS) * len(args.dtypes), unit="cell", disable=None):
        cells |= part
    wrong = unequal(cells) + ([] if before is None else differing(before, cells))
    if args.save is not None:
        args.save.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
    print("\n".join(wrong), end="\n" if wrong else "")
    print(json.dumps({part: digest([cell[part] for cell in cells.values()]) for part in ("ids", "drafts")}))
    return int(bool(wrong))


def read(path: Path) -> Any:
    """Read the cells that `--save` wrote. Raises ValueError for any other file."""
    cells = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(cells, dict) or not all(isinstance(cell, dict) for cell in cells.values()):
        raise ValueError(f"{path}: not a file of --save")
    return cells


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
