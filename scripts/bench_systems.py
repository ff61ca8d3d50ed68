"""Systems that scripts/bench.py compares: our engine with a proposer and a draft shape, and other programs. By name:

    off  off:again                         our engine, plain decoding; a second time, to show how much speed varies
    head  ngram  suffix  combined  ...     our engine with that proposer, configured by `proposer.*`
    eagle3  medusa  ...                    our engine with the exported head of that name
    head:chain5  medusa:tree16  ...        the same with another draft shape
    head:auto5  ngram:auto3  ...           adaptive chains of up to that many tokens
    head:auto-tree16  ...                  adaptive trees: at most the 16 best nodes of a beam search
    hf  hf_lookup  hf_assisted             transformers' generate: plain (in batches of prompts), with prompt lookup
                                           and with proposer.draft_model as the assistant (one prompt at a time)
    server  vllm  llama.cpp  ...           servers, ours among them (scripts/peer_servers.py)

All systems of our engine share one Engine; its proposer is set before the clock starts. An adaptive system keeps its
cost and acceptance models from round to round, as a server does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from infer.config import ENGINE_SYSTEMS, SERVERS, TRANSFORMERS, BenchConfig, ProposerConfig
from infer.config_checks import resolve_path
from infer.options.draft_tree import CHAIN, Beam
from infer.options.exported_heads import head_folder
from infer.speculation.control.step_times import StepTimes
from models.heads import HEADS
from models.heads.config import HeadConfig
from scripts.bench_prompts import Task


class RunResult(NamedTuple):
    token_ids: list[list[int]]
    acceptance_length: float | None = None
    steps: StepTimes | None = None  # of our engine


class System(NamedTuple):
    prepare: Callable[[], None]  # called before each timed run
    run: Callable[[list[Task], float, int], RunResult]  # tasks, temperature, max_concurrency


def shaped(config: ProposerConfig, shape: str) -> ProposerConfig:
    """Return `config` with the draft shape that `shape` names.

    `chain5`: chains of five tokens. `auto5`: adaptive chains of up to five tokens. `tree16`: the 16 best nodes of a
    beam search, 4 wide and 5 deep up to 16 nodes, else 8 wide and 7 deep. `auto-tree16`: the same, adaptive. `fixed16`:
    the fixed tree of that many nodes that was measured for the head. `engine_system` limits the depth to that of a
    named head. Raises ValueError for any other shape.
    """
    match = re.fullmatch(r"(auto-tree|auto|chain|tree|fixed)(\d+)", shape)
    if match is None:
        raise ValueError(
            f"systems: shape {shape}: must be chain<depth>, auto<depth>, tree<nodes>, auto-tree<nodes> or fixed<nodes>"
        )
    kind, size = match[1], int(match[2])
    if kind == "fixed":
        return replace(config, max_draft_tokens=5, tree=f"measured:{size}")
    if kind in ("auto", "chain"):
        return replace(config, max_draft_tokens=size, tree=CHAIN, adaptive=kind == "auto")
    beam = Beam(4, 5, size) if size <= 16 else Beam(8, 7, size)
    return replace(config, max_draft_tokens=beam.depth, tree=str(beam), adaptive=kind == "auto-tree")


def no_deeper(config: ProposerConfig, depth: int | None) -> ProposerConfig:
    """Return `config` with chains and beams no deeper than a head can draft; None: as deep as they are."""
    if depth is None:
        return config
    tree = config.shape
    if isinstance(tree, Beam):
        config = replace(config, tree=str(tree._replace(depth=min(depth, tree.depth))))
    return replace(config, max_draft_tokens=min(depth, config.max_draft_tokens))


def is_ours(name: str) -> bool:
    """Return whether the system runs on the engine in this process.

    Its ids must equal those of `off`, and adaptive systems must not be slower than `off`.
    """
    return name.partition(":")[0] in ENGINE_SYSTEMS


def is_adaptive(name: str) -> bool:
    return is_ours(name) and ":auto" in name


def engine_system(name: str, config: BenchConfig, engine: Any, heads: Mapping[str, Any]) -> System:
    from infer.request import SamplingParams, SpeculationStats
    from infer.speculation.measured_tree import resolve_tree

    proposer, _, shape = name.partition(":")
    drafts = shaped(config.proposer, shape) if shape and proposer != "off" else config.proposer
    if proposer in heads:
        drafts = no_deeper(drafts, heads[proposer].config.max_depth)
    drafts = resolve_tree(drafts, folder_of(config, proposer))

    def prepare() -> None:
        if proposer in heads:
            engine.set_proposer("head", heads[proposer], config=drafts)
        else:
            engine.set_proposer("none" if proposer == "off" else proposer, config=drafts)

    def run(tasks: list[Task], temperature: float, max_concurrency: int) -> RunResult:
        params = SamplingParams(temperature=temperature, seed=config.seed, ignore_eos=config.ignore_eos)
        task_params = [replace(params, max_tokens=task.tokens) for task in tasks]
        before = replace(engine.stats.steps)
        completions = engine.generate([task.prompt for task in tasks], task_params, max_concurrency=max_concurrency)
        if engine.stats.proposer_failures:
            raise ValueError(f"systems: {name}: its proposer failed, so this would measure plain decoding; see the log")
        stats = SpeculationStats()
        for completion in completions:
            stats.merge(completion.stats)
        length = stats.acceptance_length if proposer != "off" else None
        return RunResult([c.token_ids for c in completions], length, engine.stats.steps - before)

    return System(prepare, run)


def load_heads(config: BenchConfig, engine: Any) -> dict[str, Any]:
    """Load the exported heads that system names refer to, by name."""
    from models.heads.files import load_head

    names = {name.partition(":")[0] for name in config.systems} & set(HEADS)
    options = {"dtype": engine.dtype, "device": engine.device, "target": engine.target}
    return {name: load_head(folder_of(config, name), name=name, **options) for name in sorted(names)}


def folder_of(config: BenchConfig, proposer: str) -> Path:
    """Return the folder of the head that `proposer` names, else that of the configured head."""
    head = HeadConfig(name=proposer) if proposer in HEADS else config.head
    return head_folder(head, config.output_dir, config.model.name)


def transformers_systems(config: BenchConfig, checkpoint: Path, ends: tuple[int, ...]) -> dict[str, System]:
    """Load the transformers systems that `config.systems` names; `ends` are the target's end tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from infer.engine.loading import dtype_name
    from scripts.gguf_files import folder_of_target

    wanted = [name for name in TRANSFORMERS if name in config.systems]
    if not wanted:
        return {}
    if "hf_assisted" in wanted and config.proposer.draft_model is None:
        raise ValueError("systems: hf_assisted: needs proposer.draft_model=<folder or hub id of a smaller target>")
    name = dtype_name(config.model)
    folder, dtype = folder_of_target(resolve_path(config.peers), checkpoint, name), getattr(torch, name)
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype).eval()

    def generate(tasks: list[Task], temperature: float, **options: Any) -> list[list[int]]:
        """Generate as many tokens for every task as for the longest, then drop those beyond each task's length."""
        prompts, longest = [task.prompt for task in tasks], max(task.tokens for task in tasks)
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
        out = model.generate(
            ids,
            attention_mask=mask,
            min_new_tokens=longest if config.ignore_eos else None,
            max_new_tokens=longest,
            pad_token_id=0,
            eos_token_id=list(ends) or None,
            **sampling,
            **options,
        )
        completions = [ids[width : width + task.tokens] for ids, task in zip(out.tolist(), tasks, strict=True)]
        return completions if config.ignore_eos else [until_end(ids, ends) for ids in completions]

    def plain(tasks: list[Task], temperature: float, max_concurrency: int) -> RunResult:
        groups = (tasks[start : start + max_concurrency] for start in range(0, len(tasks), max_concurrency))
        return RunResult([ids for group in groups for ids in generate(group, temperature)])

    def lookup(tasks: list[Task], temperature: float, max_concurrency: int) -> RunResult:
        drafts = config.proposer.max_draft_tokens
        completions = [generate([task], temperature, prompt_lookup_num_tokens=drafts)[0] for task in tasks]
        return RunResult(completions)

    drafter: Any = None
    if "hf_assisted" in wanted:
        assert config.proposer.draft_model is not None
        drafter = AutoModelForCausalLM.from_pretrained(config.proposer.draft_model, dtype=dtype).eval()

    def assisted(tasks: list[Task], temperature: float, max_concurrency: int) -> RunResult:
        return RunResult([generate([task], temperature, assistant_model=drafter)[0] for task in tasks])

    runs = {"hf": plain, "hf_lookup": lookup, "hf_assisted": assisted}
    return {name: System(lambda: None, runs[name]) for name in wanted}


def until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    """Return the ids up to and including the first end token."""
    return ids[: next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))]


def server_systems(config: BenchConfig, stack: ExitStack) -> dict[str, System]:
    """Start the servers one after another; `stack` stops them. A server is paused (SIGSTOP) unless it is measured."""
    from scripts.peer_servers import context_of, end_as_interrupted, make_server

    end_as_interrupted()
    context = context_of(config.prompt_tokens, config.max_tokens)
    sizes: dict[str, Any] = {"slots": max(config.concurrency), "context": context, "ignore_eos": config.ignore_eos}

    def system(name: str) -> System:
        server = stack.enter_context(make_server(name, config, **sizes))
        server.rest()

        def run(tasks: list[Task], temperature: float, max_concurrency: int) -> RunResult:
            with server.awake():
                return RunResult(*server.complete(tasks, temperature, config.seed, max_concurrency))

        return System(lambda: None, run)

    return {name: system(name) for name in config.systems if name.partition(":")[0] in SERVERS}


def make_systems(config: BenchConfig, engine: Any, stack: ExitStack) -> dict[str, System]:
    """Return the systems of `config.systems` by name, `off` first; `stack` stops the servers.

    Raises ValueError for a proposer, a head or a server that is not available.
    """
    proposers = {"off", *HEADS, *engine.proposer_names}
    for name in config.systems:
        proposer = name.partition(":")[0]
        if proposer not in (*proposers, *TRANSFORMERS, *SERVERS):
            raise ValueError(
                f"systems: {name}: this engine has {', '.join(engine.proposer_names)}"
                + ("; train a head (python train/run.py), or drop it from systems" if proposer == "head" else "")
            )
    heads = load_heads(config, engine)
    systems = {name: engine_system(name, config, engine, heads) for name in config.systems if is_ours(name)}
    systems |= transformers_systems(config, engine.target.folder, engine.end_tokens)
    systems |= server_systems(config, stack)
    return {name: systems[name] for name in sorted(systems, key=lambda name: name != "off")}
