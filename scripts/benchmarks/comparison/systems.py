"""Systems that scripts/bench.py compares: our engine with a proposer and a draft shape, and other programs. By name:

    off  off:again                         our engine, plain decoding; a second time, to show how much speed varies
    head  ngram  suffix  combined  ...     our engine with that proposer, configured by `proposer.*`
    eagle3  medusa  ...                    our engine with the exported head of that name
    head:chain5  medusa:tree16  ...        the same with another draft shape
    head:auto5  ngram:auto3  ...           adaptive chains of up to that many tokens
    head:auto-tree16  ...                  adaptive trees: at most the 16 best nodes of a beam search
    hf  hf_lookup                          transformers' generate: plain (in batches of prompts), with prompt lookup
                                           (one prompt at a time)
    llama.cpp  openvino:ngram  vllm:head:chain3  ...       other programs' servers (servers.py)

All systems of our engine share one Engine; its proposer is set before the clock starts. An adaptive system keeps its
cost and acceptance models from round to round, as a server does.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from infer.config import ProposerConfig
from infer.console.compare import Run, timed
from infer.options.exported_heads import head_folder
from infer.request import SamplingParams
from infer.settings.draft_tree import CHAIN, Beam
from models.heads import HEADS
from models.heads.config import HeadConfig
from scripts.benchmarks.config import ENGINE_SYSTEMS, TRANSFORMERS, CompareConfig, PromptsConfig
from scripts.benchmarks.prompts import Task

System = Callable[[list[Task], float, int], Run]  # takes tasks, temperature and how many are in flight


def shaped(config: ProposerConfig, shape: str) -> ProposerConfig:
    """Return `config` with the draft shape that `shape` names.

    `chain5`: chains of five tokens. `auto5`: adaptive chains of up to five tokens. `tree16`: the 16 best nodes of a
    beam search, 4 wide and 5 deep up to 16 nodes, else 8 wide and 7 deep. `auto-tree16`: the same, adaptive. `fixed16`:
    the fixed tree of that many nodes that was measured for the head. Raises ValueError for any other shape.
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


def is_ours(name: str) -> bool:
    """Return whether the system runs on the engine in this process.

    Its ids must equal those of `off`, and adaptive systems must not be slower than `off`.
    """
    return name.partition(":")[0] in ENGINE_SYSTEMS


def is_adaptive(name: str) -> bool:
    return is_ours(name) and ":auto" in name


def engine_system(
    name: str,
    config: PromptsConfig,
    proposer: ProposerConfig,
    engine: Any,
    heads: Mapping[str, Any],
    *,
    ignore_eos: bool = False,
) -> System:
    """Return the system of `engine` of that name, which drafts as `proposer` states unless the name has a shape.

    A system named after a head in `heads` drafts with that one. No head drafts beyond its maximal depth.
    """
    from infer.options.exported_heads import resolve_tree

    source, _, shape = name.partition(":")
    drafts = shaped(proposer, shape) if shape and source != "off" else proposer
    head = heads.get(source, engine.head if source == "head" else None)
    if head is not None and (depth := head.config.max_depth) is not None:
        if isinstance(tree := drafts.shape, Beam):
            drafts = replace(drafts, tree=str(tree._replace(depth=min(depth, tree.depth))))
        drafts = replace(drafts, max_draft_tokens=min(depth, drafts.draft_tokens))
    drafts = replace(drafts, name="none" if source == "off" else "head" if source in heads else source)
    drafts = resolve_tree(drafts, folder_of(config, source))

    def run(tasks: list[Task], temperature: float, concurrency: int) -> Run:
        params = SamplingParams(temperature=temperature, seed=config.seed, ignore_eos=ignore_eos)
        result = timed(
            engine,
            drafts.name,
            [task.prompt for task in tasks],
            [replace(params, max_tokens=task.tokens) for task in tasks],
            max_concurrency=concurrency,
            head=heads.get(source),
            config=drafts,
        )
        if engine.stats.proposer_failures:
            raise ValueError(f"systems: {name}: its proposer failed, so this would measure plain decoding; see the log")
        return result

    return run


def folder_of(config: PromptsConfig, proposer: str) -> Path:
    """Return the folder of the head that `proposer` names, else that of the configured head."""
    head = HeadConfig(name=proposer) if proposer in HEADS else config.head
    return head_folder(head, config.output_dir, config.model)


def transformers_systems(config: CompareConfig, ends: tuple[int, ...]) -> dict[str, System]:
    """Load the transformers systems that `config.systems` names; `ends` are the target's end tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from infer.devices import dtype_name
    from scripts.benchmarks.comparison.servers import target_folder

    wanted = [name for name in TRANSFORMERS if name in config.systems]
    if not wanted:
        return {}
    dtype, folder = getattr(torch, dtype_name(config.model)), str(target_folder(config.model, config.peers))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def generate(tasks: list[Task], temperature: float, **options: Any) -> list[list[int]]:
        """Generate as many tokens for every task as for the longest, then drop those beyond each task's length."""
        prompts, longest = [task.prompt for task in tasks], max(task.tokens for task in tasks)
        width = max(map(len, prompts))
        out = model.generate(
            torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
            min_new_tokens=longest if config.ignore_eos else None,
            max_new_tokens=longest,
            pad_token_id=0,
            eos_token_id=list(ends) or None,
            **({"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}),
            **options,
        )
        completions = [ids[width : width + task.tokens] for ids, task in zip(out.tolist(), tasks, strict=True)]
        if config.ignore_eos:
            return completions
        lengths = (next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids)) for ids in completions)
        return [ids[:length] for ids, length in zip(completions, lengths, strict=True)]

    def system(size: int | None, **options: Any) -> System:
        """Return a system that generates `size` prompts at once, None for as many as are to be in flight."""

        def run(tasks: list[Task], temperature: float, concurrency: int) -> Run:
            begin, at_once = time.perf_counter(), size or concurrency
            groups = (tasks[start : start + at_once] for start in range(0, len(tasks), at_once))
            completions = [ids for group in groups for ids in generate(group, temperature, **options)]
            return Run(completions, time.perf_counter() - begin)

        return run

    systems = {"hf": system(None), "hf_lookup": system(1, prompt_lookup_num_tokens=config.proposer.draft_tokens)}
    return {name: systems[name] for name in wanted}


def make_systems(config: CompareConfig, engine: Any, stack: ExitStack) -> dict[str, System]:
    """Return the systems of `config.systems` by name, `off` first; `stack` stops the servers.

    Raises ValueError for a proposer, a head or a server that is not available.
    """
    from models.heads.files import load_head

    proposers = {"off", *HEADS, *engine.speculator.names}
    for name in config.systems:
        proposer = name.partition(":")[0]
        if proposer not in (*proposers, *TRANSFORMERS, *config.servers):
            raise ValueError(
                f"systems: {name}: this engine has {', '.join(engine.speculator.names)}"
                + ("; train a head (python train/run.py), or drop it from systems" if proposer == "head" else "")
            )
    options = {"dtype": engine.dtype, "device": engine.device, "target": engine.target}
    sources = {name.partition(":")[0] for name in config.systems}
    named = sorted(sources & {*HEADS})
    if named and "head" in sources:  # the engine's head is replaced in between; else it keeps its acceptance model
        named.append("head")
    heads = {}
    for name in named:
        head_name = config.head.name if name == "head" else name
        heads[name] = load_head(folder_of(config, name), name=head_name, **options)
    systems = {
        name: engine_system(name, config, config.proposer, engine, heads, ignore_eos=config.ignore_eos)
        for name in config.systems
        if is_ours(name)
    }
    systems |= transformers_systems(config, engine.end_tokens)
    if servers := [name for name in config.systems if name.partition(":")[0] in config.servers]:
        from scripts.benchmarks.comparison.servers import make_server

        signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C it then stops them
        for name in servers:
            server = stack.enter_context(make_server(name, config).running())
            server.rest()
            systems[name] = partial(server.run, seed=config.seed)
    return {name: systems[name] for name in sorted(systems, key=lambda name: name != "off")}
