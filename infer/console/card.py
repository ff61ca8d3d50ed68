"""Summary cards for users: the configuration and the results. Plain text when the output is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from infer.config import BLOCKS, ModelConfig, ProposerConfig
from infer.console.command_words import head_words, model_overrides, python_command
from infer.options.exported_heads import head_folder
from infer.options.stored_weights import drafter_format, why_widened
from infer.request import SamplingParams, SpeculationStats
from infer.settings.draft_tree import MOST, Beam
from infer.settings.paths import short
from infer.speculation.control.cost_model import CostTable
from kernels.linear import reads_narrow
from kernels.weights.ggml import reads_ggml
from models.checkpoint import stored_formats
from models.heads.config import HeadConfig
from models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from infer.engine import Engine

SPELLED = {"ngram": "n-gram lookup", "suffix": "suffix decoding"}  # proposers whose names in configs are short
Row = tuple[str, str]


def print_card(title: str, rows: Iterable[Row], *, out: TextIO | None = None) -> None:
    """Print a card to `out`, by default standard output."""
    out = out or sys.stdout
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(name, value)
    console = Console(file=out, highlight=False, markup=False, soft_wrap=False)
    if console.is_terminal:
        console.print(Panel(table, title=title, title_align="left", expand=False))
        return
    # A file has no width: one line per row, nothing wrapped or cut.
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    print(title, file=out)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}", file=out)


def describe_engine(engine: Engine, model: ModelConfig, head: HeadConfig, output_dir: str) -> Sequence[Row]:
    """Return the rows shown at every start: the target and its dtype, the proposer, end tokens, memory."""
    assert engine.tokenizer is not None
    pages, size, ranks = engine.memory.pages, engine.config.page_size, engine.config.tensor_parallel
    drafts = describe_proposer(engine.proposer_name, engine.proposer_config, head, model, output_dir)
    return [
        ("model", f"{model.name} ({model.path}), {str(engine.dtype).removeprefix('torch.')} on {engine.device}"),
        ("speculation", drafts),
        *(("head", note) for note in getattr(engine.head, "notes", ())),
        ("context", f"{engine.context} tokens"),
        ("end tokens", describe_end_tokens(engine.end_tokens, engine.tokenizer)),
        ("KV pool", f"{pages} pages of {size} tokens"),
        ("steps", str(engine.sizes)),
        *describe_weights(engine),
        *(quantized_row("head weights", engine.config.head_weights, engine) if engine.head else ()),
        *describe_draft_model(engine),
        *describe_activations(engine),
        *([("ranks", f"{ranks}, each with a part of the target and of its KV; rank 0 drafts")] if ranks > 1 else []),
        ("memory", str(engine.memory)),
    ]


def describe_weights(engine: Engine) -> Sequence[Row]:
    """Return how weights are stored that the checkpoint holds in blocks or groups, and why if they were dequantized."""
    target, weights = engine.target, engine.config.weights
    formats = ", ".join(stored_formats(target.folder))
    if not formats:
        return []
    if target.ggml_formats:
        return [("weights", f"{formats} as published, in panels of 64 outputs")]
    text = f"{formats}, dequantized to {str(engine.dtype).removeprefix('torch.')}"
    if weights not in ("same", "widened"):
        return [("weights", f"{text}, then quantized to {weights}")]
    if weights == "widened":
        return [("weights", text)]
    divided = engine.config.tensor_parallel > 1
    return [("weights", f"{text}: {why_widened(target.folder, engine.dtype, engine.device, divided=divided)}")]


def describe_draft_model(engine: Engine) -> Sequence[Row]:
    """Return which draft model there is, what it shares with the target, and how its weights are stored."""
    draft, vocab_size = engine.draft_model, engine.target.config.vocab_size
    if draft is None:
        return []
    is_parallel = draft.config.mask_token is not None
    text = f"{engine.proposer_config.draft_model or draft.model.path}{', in parallel' if is_parallel else ''}"
    if draft.num_drafted < min(vocab_size, draft.config.draft_vocab_size):
        text += f", has {draft.num_drafted:,} of the target's {vocab_size:,} tokens and drafts no other"
    weights = quantized_row("draft weights", engine.config.draft_weights, engine)
    if draft.model.ggml_formats:
        weights = [("draft weights", f"{', '.join(draft.model.ggml_formats)} as published")]
    return [("draft model", text), *weights]


def quantized_row(name: str, choice: str, engine: Engine) -> Sequence[Row]:
    """Return how a drafter's weights were quantized, and whether a kernel reads them so."""
    chosen = drafter_format(choice, engine.dtype, engine.device)
    if chosen == "same":
        return []
    dtype, device = engine.dtype, engine.device
    read = reads_ggml(chosen.upper(), dtype, device) if chosen in BLOCKS else reads_narrow(8, dtype, device)
    widened = f", dequantized to {str(dtype).removeprefix('torch.')}: no kernel reads it"
    return [(name, chosen if read else chosen + widened)]


def describe_activations(engine: Engine) -> Sequence[Row]:
    """Return that linear layers quantize their input, if they do, and how to have it otherwise if nobody asked."""
    if not engine.rounds_activations:
        return []
    text = "8 bits, a scale for every 32 values, where weights are integers: another rounding"
    unasked = "; engine.activations=same is without it" if engine.config.activations == "auto" else ""
    return [("activations", text + unasked)]


def describe_proposer(name: str, config: ProposerConfig, head: HeadConfig, model: ModelConfig, output_dir: str) -> str:
    """Return what the engine drafts with and, for an automatic choice, why."""
    if name == "none":
        return "off"
    drafts = f"up to {config.draft_tokens} draft tokens per step"
    pays = ", as far as it pays" if config.adaptive else ""
    tree = config.shape if name in ("head", "draft_model") else None
    if isinstance(tree, Beam):
        drafts = f"trees {tree.width} wide and {tree.depth} deep"
        drafts += f", {tree.nodes} nodes of them" if tree.nodes < MOST else ""
    elif isinstance(tree, list):
        drafts = f"a fixed tree of {len(tree)} nodes per step"
    if name == "head":
        place = (
            f"{head.path}, revision {head.revision}"
            if head.path and head.revision
            else head.path or short(head_folder(head, output_dir, model))
        )
        modules = ", the target's own modules" if head.path == model.path_or_hub_id else ""
        return f"head {head.name} from {place}{modules}, {drafts}{pays}"
    sources = f" of {', '.join(config.sources)}" if name == "combined" else ""
    drafter = f"{SPELLED.get(name, name.replace('_', ' '))}{sources}, {drafts}{pays}"
    if config.name == "auto" and head.name != "none":
        folder = head_folder(head, output_dir, model)
        command = python_command("train/run.py", *model_overrides(model), *head_words(head, output_dir))
        return f"{drafter} (no head at {short(folder)}; train one: {command})"
    return drafter


def describe_end_tokens(ids: Iterable[int], tokenizer: Tokenizer) -> str:
    """Return each end token that the checkpoint's files name, with its text; any of them ends an answer."""
    texts = {token: tokenizer.backend.id_to_token(token) for token in ids}
    shown = (f"{token} {text if (text or '').isprintable() else repr(text)}" for token, text in texts.items())
    return ", ".join(shown) or "none: only max_tokens and what a request names end an answer"


def describe_costs(table: CostTable | None) -> Sequence[Row]:
    """Return the costs that the controller uses: plain steps, and the deepest drafts, at several batch sizes."""
    if table is None:
        return []
    shown = [index for index, batch in enumerate(table.batches) if batch in (1, 4, 16, 64)]
    at = " / ".join(str(table.batches[index]) for index in shown)

    def milliseconds(seconds: Iterable[float]) -> str:
        return " / ".join(f"{1000 * value:.1f}" for value in seconds)

    plain = milliseconds(table.steps[index].seconds[0] for index in shown)
    rows = [("step", f"{plain} ms at {at} requests")]
    for name, curves in table.drafts.items():
        drafting = milliseconds(curves[index].seconds[-1] for index in shown)
        rows.append((f"drafting, {name.replace('_', ' ')}", f"{drafting} ms, {curves[0].sizes[-1]:g} deep for all"))
    for name, each in table.reads.items():
        rows.append((f"reading, {name.replace('_', ' ')}", f"{1e6 * each:.2g} ms for 1000 tokens of a prompt"))
    return rows


def describe_sampling(params: SamplingParams) -> str:
    if params.temperature == 0:
        return "greedy"
    limits = (f", top-k {params.top_k}" if params.top_k else "") + (
        f", top-p {params.top_p}" if params.top_p < 1 else ""
    )
    return f"temperature {params.temperature:g}{limits}, seed {params.seed}"


def acceptance(stats: SpeculationStats) -> Sequence[Row]:
    by_position = " ".join(f"{share:.0%}" for share in stats.acceptance_by_position)
    return [
        ("acceptance length τ", f"{stats.acceptance_length:.2f} tokens per verify"),
        ("acceptance by position", by_position or "nothing was drafted"),
    ]
