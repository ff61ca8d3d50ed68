"""How good an exported head is, by data set, temperature, chat template, draft shape and length of the prompt.

    python scripts/eval.py model=demo head=eagle3
    python scripts/eval.py model=demo head=eagle3 files=[gsm8k/test.jsonl] columns='{prompt: question}' temperatures=[0]
    python scripts/eval.py model=demo head=eagle3 temperatures=[0] shapes=[chain3] concurrency=[1,4,16]

`files` are what data.path of training takes; none means held-out prompts of the demo corpus. Speed is a ratio to plain
decoding of the same prompts in the same round. A verify is cut short by the draft vocabulary where it ended at a token
which that does not hold: no draft could have been right. Tables and plots go to <output_dir>/eval/<model>-<head>/; the
last line of standard output is one JSON document.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
os.environ.setdefault("USE_HUB_KERNELS", "NO")

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from infer.cli import entry_point
from infer.compare import Comparison, Pair
from infer.config import EvalConfig, ProposerConfig
from infer.config_checks import resolve_path
from infer.request import SpeculationStats

DEMO = "demo corpus"
BUCKETS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # prompts of up to so many tokens
REPORT = "report.md"


@dataclass
class Context:
    acceptance_length: float
    coverage: float
    cut_short: float


@dataclass
class Cell:
    """One data set, with or without the chat template, at one temperature, with drafts of one shape, at one number of
    prompts together.
    """

    data: str
    template: bool
    temperature: float
    shape: str
    concurrency: int
    prompts: int
    acceptance_length: float
    by_position: list[float]
    by_context: dict[str, Context]  # for prompts of up to so many tokens
    coverage: float  # share of the emitted tokens that the draft vocabulary holds
    cut_short: float  # share of the verifies that ended at one which it does not: what it costs, at most
    tokens_per_s: float
    ratio: float  # to plain decoding, median over the rounds
    identical: bool  # token ids, to plain decoding's


def prompt_sets(config: EvalConfig, engine: Any) -> Iterator[tuple[str, bool, list[list[int]]]]:
    """Name, whether the chat template was used, prompts. Raises ValueError for data that cannot be read."""
    from models.demo.corpus import held_out_prompts
    from train.config import FilesDataConfig
    from train.prompts import Reader

    if not config.files:
        yield DEMO, False, held_out_prompts(engine.tokenizer, config.num_prompts, config.prompt_tokens)
    longest = engine.context - config.max_tokens - 1
    for path, name in zip(config.files, names_of(config.files), strict=True):
        for template in config.chat_template:
            settings = FilesDataConfig(
                name="files",
                path=path,
                columns=config.columns,
                chat_template=template,
                prompt_tokens=config.prompt_tokens,
            )
            reader = Reader(settings, engine.tokenizer, longest, config.num_prompts)
            yield name, template, reader.read_prompts()


def names_of(files: Sequence[str]) -> list[str]:
    """Without suffixes; where two are called alike, with their folders': gsm8k/test."""
    names = [Path(file).name.partition(".")[0] for file in files]
    return [
        f"{Path(file).parent.name}/{name}" if names.count(name) > 1 else name
        for file, name in zip(files, names, strict=True)
    ]


def measure(config: EvalConfig, engine: Any) -> list[Cell]:
    from tqdm import tqdm

    from infer.compare import compare
    from infer.request import SamplingParams
    from scripts.bench_systems import shaped

    cells = []
    sets = list(prompt_sets(config, engine))
    rounds = list(itertools.product(sets, config.temperatures, config.concurrency))
    with tqdm(total=len(rounds) * len(config.shapes), unit="cell", disable=None, dynamic_ncols=True) as bar:
        for (name, template, prompts), temperature, together in rounds:
            params = SamplingParams(temperature=temperature, seed=config.seed, max_tokens=config.max_tokens)
            groups = [prompts[start : start + together] for start in range(0, len(prompts), together)]
            for shape in config.shapes:
                bar.set_description(f"{name}, temperature {temperature:g}, {shape}")
                depth = engine.head.config.max_depth
                drafts = shaped(ProposerConfig(name="head"), shape)
                if depth is not None:
                    drafts = replace(drafts, max_draft_tokens=min(depth, drafts.max_draft_tokens))
                engine.set_proposer("head", config=drafts)
                found = Comparison(list(compare(engine, groups, params)))
                ids = engine.head.target_ids.cpu()
                cells.append(cell(name, template, temperature, shape, together, groups, found, ids))
                bar.update()
    return cells


def cell(
    name: str,
    template: bool,
    temperature: float,
    shape: str,
    concurrency: int,
    groups: list,
    found: Comparison,
    target_ids: Any,
) -> Cell:
    whole = about(found.pairs, target_ids)
    return Cell(
        data=name,
        template=template,
        temperature=temperature,
        shape=shape,
        concurrency=concurrency,
        prompts=sum(map(len, groups)),
        acceptance_length=whole.acceptance_length,
        by_position=found.speculation.acceptance_by_position,
        by_context=by_context([max(map(len, group)) for group in groups], found, target_ids),
        coverage=whole.coverage,
        cut_short=whole.cut_short,
        tokens_per_s=found.on_tokens_per_s,
        ratio=found.ratio.median,
        identical=found.identical,
    )


def about(pairs: Sequence[Pair], target_ids: Any) -> Context:
    """Only the target's own token, which ends a verify, can be one that the draft vocabulary lacks.

    The first token of an answer comes from its prompt, and ends none.
    """
    import torch

    from models.vocab import coverage

    answers = [ids for pair in pairs for ids in pair.on.token_ids]
    emitted, later = (torch.tensor([t for ids in answers for t in ids[first:]]) for first in (0, 1))
    stats = SpeculationStats()
    for pair in pairs:
        stats.merge(pair.on.speculation)
    lacking = len(later) - round(len(later) * coverage(later, target_ids)) if len(later) else 0
    return Context(stats.acceptance_length, coverage(emitted, target_ids), lacking / max(1, stats.steps))


def by_context(lengths: Sequence[int], found: Comparison, target_ids: Any) -> dict[str, Context]:
    """By the length of the prompts (of the longest, of those that run together)."""
    groups: dict[int, list[Pair]] = {}
    for length, pair in zip(lengths, found.pairs, strict=True):
        bucket = next((limit for limit in BUCKETS if length <= limit), 2 * BUCKETS[-1])
        groups.setdefault(bucket, []).append(pair)
    return {str(bucket): about(groups[bucket], target_ids) for bucket in sorted(groups)}


def table(cells: Sequence[Cell]) -> str:
    rows = [
        "| data | chat template | temperature | drafts | at once | τ | by position | coverage | cut short | tokens/s "
        "| ratio | same ids |"
    ]
    rows.append("|" + "---|" * 12)
    for own in cells:
        shares = " ".join(f"{share:.2f}" for share in own.by_position)
        rows.append(
            f"| {own.data} | {'yes' if own.template else 'no'} | {own.temperature:g} | {own.shape} | "
            f"{own.concurrency} | {own.acceptance_length:.3f} | {shares} | {100 * own.coverage:.1f} % | "
            f"{100 * own.cut_short:.1f} % | {own.tokens_per_s:.1f} | "
            f"{own.ratio:.2f} | {'yes' if own.identical else 'NO'} |"
        )
    return "\n".join(rows)


def context_table(cells: Sequence[Cell]) -> str:
    """τ, coverage of the draft vocabulary, and how many verifies it cut short."""
    limits = sorted({int(limit) for own in cells for limit in own.by_context})
    rows = ["| data | temperature | drafts | at once | " + " | ".join(f"up to {limit}" for limit in limits) + " |"]
    rows.append("|" + "---|" * (4 + len(limits)))
    for own in cells:
        found = [own.by_context.get(str(limit)) for limit in limits]
        values = [
            f"{c.acceptance_length:.3f}, {100 * c.coverage:.1f} %, {100 * c.cut_short:.1f} %" if c else ""
            for c in found
        ]
        rows.append(
            f"| {own.data} | {own.temperature:g} | {own.shape} | {own.concurrency} | " + " | ".join(values) + " |"
        )
    return "\n".join(rows)


def draw(cells: Sequence[Cell], folder: Path) -> list[str]:
    """Acceptance by position, one curve per data set and temperature, for every shape; speed over concurrency, if there
    are several, one curve per shape too. None without matplotlib.
    """
    from train.plots import PLAIN_SPEED, draw_curves

    written = []
    for shape in dict.fromkeys(own.shape for own in cells):
        own_cells = [own for own in cells if own.shape == shape and own.concurrency == cells[0].concurrency]
        curves = {label_of(own): list(enumerate(own.by_position, start=1)) for own in own_cells}
        names = "position in the draft", "share that is accepted"
        written.append(draw_curves(folder / f"acceptance_{shape}.png", curves, *names, ylim=(0, 1), title=shape))
    if len({own.concurrency for own in cells}) > 1:
        speeds: dict[str, list[tuple[float, float]]] = {}
        for own in sorted(cells, key=lambda own: own.concurrency):
            speeds.setdefault(f"{label_of(own)}, {own.shape}", []).append((own.concurrency, own.ratio))
        written.append(draw_curves(folder / "speed.png", speeds, "requests at once", PLAIN_SPEED, level=1))
    return [path.name for path in written if path is not None]


def label_of(own: Cell) -> str:
    return f"{own.data}{'' if own.template else ', plain'}, T = {own.temperature:g}"


@entry_point("eval", EvalConfig)
def main(config: EvalConfig) -> None:
    from infer.engine import Engine
    from scripts.bench import describe_machine

    # a prompt is asked again and again: cached pages would spare one side its prefill
    cold = replace(config.engine, prefix_cache=False)
    engine = Engine.load(config.model, config.head, cold, ProposerConfig(name="head"), output_dir=config.output_dir)
    cells = measure(config, engine)
    folder = resolve_path(config.output_dir) / "eval" / f"{config.model.name}-{config.head.name}"
    folder.mkdir(parents=True, exist_ok=True)
    plots = "\n\n".join(f"![{name}]({name})" for name in draw(cells, folder))
    by_length = "By the length of the prompt, in tokens: τ, coverage, verifies that the draft vocabulary cut short."
    text = f"{table(cells)}\n\n{by_length}\n\n{context_table(cells)}\n\n{plots}\n"
    title = f"# {config.head.name} for {config.model.name}\n\n"
    (folder / REPORT).write_text(title + text, encoding="utf-8")
    print(table(cells))
    print(f"written: {folder / REPORT}")
    document = {"machine": describe_machine(), "config": asdict(config), "results": [asdict(own) for own in cells]}
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
