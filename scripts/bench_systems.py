"""What the bench compares: our engine with a proposer and a draft shape, and transformers' generate. By name:

    off  off:again                         our engine, plain decoding; a second time, to see how much that varies
    head  ngram  suffix  combined  ...     our engine with that proposer, drafting as `proposer.*` says
    eagle3  medusa  ...                    our engine with the exported head of that name
    head:chain5  medusa:tree16  ...        the same with a draft shape of its own
    head:auto5  ngram:auto3  ...           chains of up to that many tokens, as far as pays
    head:auto-tree16  ...                  of a beam's 16 best nodes as many as pay
    hf  hf_lookup  hf_assisted             transformers' generate: plain (a group of prompts after another), with
                                           prompt lookup and with proposer.draft_model (one prompt at a time)
    server  vllm  llama.cpp  ...           servers, ours among them (scripts/peer_servers.py)

The engine is one for all of ours: what differs is set before the clock starts. What an adaptive one has learnt of its
costs and drafts it keeps from round to round, as a server does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from infer.config import ENGINE_SYSTEMS, MEASURED_TREE, SERVERS, TRANSFORMERS, BenchConfig, ProposerConfig
from infer.config_checks import resolve_path
from infer.options.exported_heads import head_folder
from infer.options.head_config import HEAD_NAMES, HeadConfig
from infer.speculation.control.step_times import StepTimes
from scripts.bench_prompts import Task


class RunResult(NamedTuple):
    token_ids: list[list[int]]
    acceptance_length: float | None = None
    steps: StepTimes | None = None  # of our engine


class System(NamedTuple):
    prepare: Callable[[], None]  # once before it is timed
    run: Callable[[list[Task], float, int], RunResult]  # tasks, temperature, how many of them in flight


def shaped(config: ProposerConfig, shape: str) -> ProposerConfig:
    """`chain5`: five tokens in a row. `auto5`: as many as pay, up to five. `tree16`: the 16 best nodes of a beam, 4
    wide and 5 deep up to 16 nodes, else 8 wide and 7 deep. `auto-tree16`: as many of them as pay. `fixed16`: the fixed
    tree of that many nodes that the head was measured for. A named head that drafts less far does so. Raises ValueError
    for another word.
    """
    match = re.fullmatch(r"(auto-tree|auto|chain|tree|fixed)(\d+)", shape)
    if match is None:
        raise ValueError(
            f"systems: shape {shape}: must be chain<depth>, auto<depth>, tree<nodes>, auto-tree<nodes> or fixed<nodes>"
        )
    kind, size = match[1], int(match[2])
    if kind == "fixed":
        return replace(config, max_draft_tokens=5, tree=MEASURED_TREE, tree_width=1, tree_nodes=size)
    if kind in ("auto", "chain"):
        chain = replace(config, max_draft_tokens=size, tree_width=1, tree_nodes=None, tree=None)
        return replace(chain, adaptive=kind == "auto")
    width, depth = (4, 5) if size <= 16 else (8, 7)
    tree = replace(config, max_draft_tokens=depth, tree_width=width, tree_nodes=size, tree=None)
    return replace(tree, adaptive=kind == "auto-tree")


def is_ours(name: str) -> bool:
    """The engine in this process: its ids must be those of `off`, and `auto` must not be slower."""
    return name.partition(":")[0] in ENGINE_SYSTEMS


def is_adaptive(name: str) -> bool:
    return is_ours(name) and ":auto" in name


def engine_system(name: str, config: BenchConfig, engine: Any, heads: Mapping[str, Any]) -> System:
    from infer.request import SamplingParams, SpeculationStats
    from infer.speculation.measured_tree import resolve_tree

    proposer, _, shape = name.partition(":")
    drafts = shaped(config.proposer, shape) if shape and proposer != "off" else config.proposer
    if proposer in heads and heads[proposer].config.max_depth is not None:
        drafts = replace(drafts, max_draft_tokens=min(drafts.max_draft_tokens, heads[proposer].config.max_depth))
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
    """The exported heads that systems are named after."""
    from models.heads import load_head

    names = {name.partition(":")[0] for name in config.systems} & set(HEAD_NAMES)
    options = {"dtype": engine.dtype, "device": engine.device, "target": engine.target}
    return {name: load_head(folder_of(config, name), name=name, **options) for name in sorted(names)}


def folder_of(config: BenchConfig, proposer: str) -> Path:
    """Of the head that `proposer` names, or of the configured one."""
    head = HeadConfig(name=proposer) if proposer in HEAD_NAMES else config.head
    return head_folder(head, config.output_dir, config.model.name)


def transformers_systems(config: BenchConfig, checkpoint: Path, ends: tuple[int, ...]) -> dict[str, System]:
    """`ends`: the target's end tokens."""
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
        """As many tokens for each as for the longest; those that were not asked for are not counted."""
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
    """Up to the first end token, which is included."""
    return ids[: next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))]


def server_systems(config: BenchConfig, stack: ExitStack) -> dict[str, System]:
    """Started here, one after another, and ended with `stack`; those that do not run stand still."""
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
    """By name, `off` first. Servers end with `stack`.

    Raises ValueError for a proposer, a head or a server that is not there.
    """
    proposers = {"off", *HEAD_NAMES, *engine.proposer_names}
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
