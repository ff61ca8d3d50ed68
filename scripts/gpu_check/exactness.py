"""Checks on this machine that token ids with drafts equal those without, in any batch, greedy and sampled."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import Completion, SamplingParams
from models.targets import load_target
from models.tokenizer import Tokenizer
from scripts.gpu_check import targets

TEXTS = (
    "import os\n\ndef main():",
    "class Error(Exception):\n",
    "    def __init__(self, name, value):\n        self.name = name\n        self.",
    "for index in range(10):\n    print(index)\nfor index in range(10):\n    ",
)
GREEDY = SamplingParams(ignore_eos=True)
COOL = SamplingParams(temperature=0.8, seed=1, ignore_eos=True)
CUT = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=2, ignore_eos=True)
CHAIN = ProposerConfig(name="auto", max_draft_tokens=4)
TREE = replace(CHAIN, tree="beam:3x4:12")


def engines(device: torch.device) -> Iterator[tuple[str, Engine, list[list[int]], int]]:
    """Yield name, engine, prompts and max_tokens; on a CPU a tiny case, because Triton's interpreter is slow."""
    if device.type != "cuda":
        target = targets.random_target("tiny", torch.float32, device)
        config = EngineConfig(max_batch=2, max_tokens_in_cache=128, prefill_chunk=16, max_rows=32)
        # The start-up probe would take minutes.
        engine = Engine(target, head=targets.taught_head(target), config=config, probe=False)
        yield "tiny, fp32", engine, [[5, 6, 7], [9, 8]], 3
        return
    for dtype in (torch.float32, torch.bfloat16):
        target = load_target(str(targets.DEMO), dtype=dtype, device=device)
        head = targets.taught_head(load_target(str(targets.DEMO)))
        tokenizer = Tokenizer.load(target.folder)
        prompts = [tokenizer.encode(text) for text in TEXTS]
        config = EngineConfig(max_batch=4)
        yield f"demo, {dtype}", Engine(target, head=head, tokenizer=tokenizer, config=config), prompts, 48
    target = targets.random_target("llama3.1-8b", torch.bfloat16, device)
    config = EngineConfig(max_batch=4, max_tokens_in_cache=8192)
    engine = Engine(target, head=targets.random_head(target, 32000), config=config)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 128000, (n,), generator=generator).tolist() for n in (5, 64, 300)]
    yield "8B shape, random, bf16", engine, [*prompts, [11, 12, 13] * 20], 24


def check(device: torch.device, deadline: float) -> list[dict[str, Any]]:
    """Return one line per target, sampling and way of drafting; those for which no time was left are `left_out`."""
    results = []
    for name, engine, prompts, tokens in engines(device):
        for kind, params in samplings(device):
            sampling_params = replace(params, max_tokens=tokens)
            use_graphs(engine, "off")
            engine.set_proposer("none")
            plain = [engine.generate([prompt], sampling_params)[0] for prompt in prompts]
            for label, proposer, shape, together, graphs in ways(device):
                line = {"target": name, "sampling": kind, "drafts": label, "batch": len(prompts) if together else 1}
                line["graphs"] = graphs
                if time.monotonic() > deadline:
                    results.append(line | {"left_out": "no time"})
                    continue
                begin = time.monotonic()
                use_graphs(engine, graphs)
                engine.set_proposer(proposer, config=shape)
                results.append(line | compare(plain, run(engine, prompts, sampling_params, together=together)))
                results[-1]["seconds"] = round(time.monotonic() - begin, 2)
        engine.close()
        del engine
    return results


def use_graphs(engine: Engine, mode: str) -> None:
    """Set CUDA graphs from the next `set_proposer` on: "off" or "on"."""
    engine.config.graphs = mode


def samplings(device: torch.device) -> list[tuple[str, SamplingParams]]:
    cases = [("greedy", GREEDY), ("T = 0.8", COOL), ("T = 1, top-k, top-p", CUT)]
    return cases if device.type == "cuda" else cases[1:2]


def ways(device: torch.device) -> list[tuple[str, str, ProposerConfig, bool, str]]:
    """Return (label, proposer, draft shape, whether all prompts run together, mode of `use_graphs`) of every way.

    Each way is compared with plain decoding without graphs, one prompt at a time.
    """
    cases = [
        ("none", "none", CHAIN, True, "on"),
        ("head, chain", "head", CHAIN, False, "on"),
        ("head, chain", "head", CHAIN, True, "on"),
        ("head, tree", "head", TREE, True, "on"),
        ("n-gram", "ngram", CHAIN, True, "off"),
        ("head, chain", "head", CHAIN, True, "off"),
        ("head, tree", "head", TREE, True, "off"),
    ]
    return cases if device.type == "cuda" else [cases[0], cases[2], cases[3]]


def run(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, *, together: bool) -> list[Completion]:
    if together:
        return engine.generate(list(prompts), params)
    return [engine.generate([prompt], params)[0] for prompt in prompts]


def compare(plain: Sequence[Completion], completions: Sequence[Completion]) -> dict[str, Any]:
    wrong = sum(actual.token_ids != expected.token_ids for actual, expected in zip(completions, plain, strict=True))
    accepted = sum(completion.stats.accepted for completion in completions)
    return {"prompts": len(plain), "different": wrong, "accepted_drafts": accepted, "ok": wrong == 0}
