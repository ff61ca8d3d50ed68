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
cost and acceptance models from round to round, as a server does. The prompts are held-out lines of the demo corpus,
which is code, or come from files.
"""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from infer.config import ProposerConfig
from infer.console.compare import Run, timed
from infer.options.draft_tree import CHAIN, Beam
from infer.options.exported_heads import head_folder
from infer.options.paths import resolve_path
from infer.request import SamplingParams
from models.heads import HEADS
from models.heads.config import HeadConfig
from scripts.config import ENGINE_SYSTEMS, SERVERS, TRANSFORMERS, BenchConfig, PromptsConfig


class Task(NamedTuple):
    prompt: list[int]
    tokens: int  # max_tokens of the response


System = Callable[[list[Task], float, int], Run]  # takes tasks, temperature and how many are in flight


def read_tasks(config: BenchConfig) -> list[Task]:
    """Return the prompts of `read_prompts`, each with an output length drawn uniformly by `seed`.

    Lengths vary because requests of a server do not all end together.
    """
    lengths = random.Random(config.seed)
    shortest = config.max_tokens if config.min_tokens is None else config.min_tokens
    return [Task(prompt, lengths.randint(shortest, config.max_tokens)) for prompt in read_prompts(config)]


def read_prompts(config: PromptsConfig) -> list[list[int]]:
    """Return the token ids of `num_prompts` prompts of at most `prompt_tokens` each, taken from the files in turn.

    Prompts of the demo corpus have exactly `prompt_tokens`. A longer conversation is skipped, because cutting it would
    change its meaning; a longer text is cut. Raises ValueError for a file that cannot be read or holds too few prompts,
    and without files unless the target is the demo target.
    """
    from models.demo.corpus import held_out_prompts
    from models.targets import resolve_checkpoint
    from models.tokenizer import Tokenizer

    if config.model.name != "demo" and not config.files:
        raise ValueError(
            f"model={config.model.name}: prompts are cut from the demo target's corpus; "
            "use model=demo, or give files=[...]"
        )
    tokenizer = Tokenizer.load(resolve_checkpoint(config.model.path_or_hub_id, config.model.revision))
    if not config.files:
        return held_out_prompts(tokenizer, config.num_prompts, config.prompt_tokens)
    share = -(-config.num_prompts // len(config.files))
    longest = config.prompt_tokens if tokenizer.chat.texts else None
    by_file = [read_file(config, file, tokenizer, share, longest) for file in config.files]
    for file, prompts in zip(config.files, by_file, strict=True):
        if len(prompts) < share:
            raise ValueError(
                f"files=[{file}]: holds {len(prompts)} prompts of up to {config.prompt_tokens} tokens; "
                f"num_prompts={config.num_prompts} needs {share} of each file"
            )
    rows = zip(*by_file, strict=True)
    return [ids[: config.prompt_tokens] for row in rows for ids in row][: config.num_prompts]


def read_file(
    config: PromptsConfig, file: str, tokenizer: Any, count: int, longest: int | None, **options: Any
) -> list[list[int]]:
    """Return up to `count` prompts of a file, of at most `longest` tokens, and print what was skipped.

    `options` are further keys of training's `data.`. Raises ValueError for a file that cannot be read.
    """
    from train.config import FilesDataConfig
    from train.data.prompts import Reader

    keys = {"path": file, "columns": config.columns, "prompt_tokens": config.prompt_tokens}
    settings = FilesDataConfig(name="files", **keys, **options)
    reader = Reader(settings, tokenizer, longest or settings.max_prompt_tokens, count)
    try:
        prompts = reader.read_prompts()
    except ValueError as error:  # the user said files=
        raise ValueError(str(error).replace("data.path=", "files=", 1)) from error
    for line in reader.reading.named():
        print(line, file=sys.stderr)
    return prompts


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
    from infer.engine.loading import resolve_tree

    source, _, shape = name.partition(":")
    drafts = shaped(proposer, shape) if shape and source != "off" else proposer
    head = heads.get(source, engine.head if source == "head" else None)
    if head is not None:
        drafts = no_deeper(drafts, head.config.max_depth)
    drafts = resolve_tree(drafts, folder_of(config, source))

    def run(tasks: list[Task], temperature: float, concurrency: int) -> Run:
        params = SamplingParams(temperature=temperature, seed=config.seed, ignore_eos=ignore_eos)
        result = timed(
            engine,
            "none" if source == "off" else "head" if source in heads else source,
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
    return head_folder(head, config.output_dir, config.model.name)


def head_folders(config: BenchConfig) -> dict[str, Path]:
    """Return the folders of the exported heads that system names refer to, and of the configured head, by name."""
    names = {name.partition(":")[0] for name in config.systems} & {*HEADS}
    wanted = sorted(names | {config.head.name} - {"none"})
    return {name: folder_of(config, name if name in names else "head") for name in wanted}


def transformers_systems(config: BenchConfig, checkpoint: Path, ends: tuple[int, ...]) -> dict[str, System]:
    """Load the transformers systems that `config.systems` names; `ends` are the target's end tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from infer.options.devices import dtype_name
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

    def system(size: int | None, **options: Any) -> System:
        """Return a system that generates `size` prompts at once, None for as many as are to be in flight."""

        def run(tasks: list[Task], temperature: float, concurrency: int) -> Run:
            begin, at_once = time.perf_counter(), size or concurrency
            groups = (tasks[start : start + at_once] for start in range(0, len(tasks), at_once))
            completions = [ids for group in groups for ids in generate(group, temperature, **options)]
            return Run(completions, time.perf_counter() - begin)

        return run

    systems = {"hf": system(None), "hf_lookup": system(1, prompt_lookup_num_tokens=config.proposer.max_draft_tokens)}
    if "hf_assisted" in wanted:
        assert config.proposer.draft_model is not None
        drafter: Any = AutoModelForCausalLM.from_pretrained(config.proposer.draft_model, dtype=dtype).eval()
        systems["hf_assisted"] = system(1, assistant_model=drafter)
    return {name: systems[name] for name in wanted}


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

        def run(tasks: list[Task], temperature: float, concurrency: int) -> Run:
            with server.awake():
                return server.complete(tasks, temperature, config.seed, concurrency)

        return run

    return {name: system(name) for name in config.systems if name.partition(":")[0] in SERVERS}


def make_systems(config: BenchConfig, engine: Any, stack: ExitStack) -> dict[str, System]:
    """Return the systems of `config.systems` by name, `off` first; `stack` stops the servers.

    Raises ValueError for a proposer, a head or a server that is not available.
    """
    from models.heads.files import load_head

    proposers = {"off", *HEADS, *engine.proposer_names}
    for name in config.systems:
        proposer = name.partition(":")[0]
        if proposer not in (*proposers, *TRANSFORMERS, *SERVERS):
            raise ValueError(
                f"systems: {name}: this engine has {', '.join(engine.proposer_names)}"
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
    systems |= transformers_systems(config, engine.target.folder, engine.end_tokens)
    systems |= server_systems(config, stack)
    return {name: systems[name] for name in sorted(systems, key=lambda name: name != "off")}
