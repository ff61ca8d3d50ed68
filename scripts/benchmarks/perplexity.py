"""Measures what ways of computing a target do to its distributions, on a text: perplexity, and KL from the first way.

    python scripts/bench.py perplexity model=smollm2-135m text=story.txt.xz
    python scripts/bench.py perplexity model=model.gguf text=story.txt \
        ways=[widened:same:float32,native,native:int8,llama.cpp]
    python scripts/bench.py perplexity model=model.gguf text=code.txt ways=[native,int4,int8:int8] dtype=bfloat16

A way is `weights[:activations[:dtype]]`, values of `engine.weights`, `engine.activations` and `model.dtype`, or
`llama.cpp`, which reads the same GGUF file. The reference is the first: `widened:same:float32` is what the file's
weights mean, computed without rounding. The text is cut into windows of `window` tokens, of which every token but the
first is predicted from those before it. In float32 the weights of a GGUF file in their blocks (`native`) and widened
ones differ only in the order of sums.
"""

from __future__ import annotations

import ctypes
import importlib
import lzma
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.options.cli import entry_point
from infer.options.paths import resolve_path
from kernels.rows import AttentionRows
from models.checkpoint import DTYPES
from models.gguf import is_gguf
from models.targets import resolve_checkpoint
from models.tokenizer import Tokenizer
from scripts.benchmarks.comparison.servers import build_suffix, check_built
from scripts.benchmarks.config import PerplexityConfig
from scripts.benchmarks.document import describe_machine, markdown, publish

PAGE = 16  # positions of a KV page
CHUNK = 64  # rows in fp64 at a time
Way = Callable[[Sequence[int]], Tensor]  # token ids of a window -> logits [T, V]; row i predicts token i + 1


@dataclass
class Scores:
    """What the windows of a text added up to."""

    losses: list[float] = field(default_factory=list)  # nats, of each token but the first of its window
    divergences: list[float] = field(default_factory=list)  # KL(reference || this), nats
    agreements: list[bool] = field(default_factory=list)  # whether both find the same token the likeliest

    def summary(self) -> dict[str, float]:
        """Return perplexity, KL (mean, its standard error, 99th percentile, largest) and the share of agreements."""
        values = torch.tensor(self.divergences, dtype=torch.float64)
        return {
            "perplexity": math.exp(math.fsum(self.losses) / len(self.losses)),
            "kl_mean": values.mean().item(),
            "kl_error": values.std().item() / math.sqrt(len(values)),
            "kl_99": values.quantile(0.99).item(),
            "kl_largest": values.max().item(),
            "same_likeliest": sum(self.agreements) / len(self.agreements),
        }


def add_window(scores: Scores, logits: Tensor, reference: Tensor, ids: Sequence[int]) -> None:
    """Add a window with token ids `ids` of length T: logits and the reference's `[T, V]`, of any float dtype."""
    following = torch.tensor(ids[1:])
    for start in range(0, len(following), CHUNK):
        rows = slice(start, min(start + CHUNK, len(following)))
        ours, theirs = (each[rows].double().log_softmax(-1) for each in (logits, reference))
        scores.losses += (-ours.gather(1, following[rows, None])[:, 0]).tolist()
        scores.divergences += (theirs.exp() * (theirs - ours)).sum(-1).tolist()
        scores.agreements += (ours.argmax(-1) == theirs.argmax(-1)).tolist()


def our_way(model: ModelConfig, engine: EngineConfig, window: int) -> Way:
    """Return a way that computes as the engine does. Raises ValueError for a configuration that it refuses."""
    from infer.engine.loading import load_parts
    from infer.processes.target_worker import Shard

    target = load_parts(model, None, ProposerConfig(name="none"), output_dir="outputs", engine=engine).target
    shard, pages = Shard(target, **engine.packing), -(-window // PAGE)
    shard.allocate(1 + pages, PAGE)
    table = 1 + torch.arange(pages)[None]

    def logits(ids: Sequence[int]) -> Tensor:
        rows = AttentionRows.blocks(table, [0], [len(ids)], page_size=PAGE)
        return shard.logits(shard.forward(torch.tensor(ids), rows.places, rows, []).hidden)

    return logits


def llama_cpp(peers: Path, file: Path, window: int, threads: int) -> Way:
    """Return a GGUF file in llama.cpp on the CPU, for up to `window` tokens at a time; keys and values are in fp16.

    llama-cpp-python's declarations are bound to the build under `peers`. Raises ValueError if either is not there.
    """
    source = check_built(peers / "llama.cpp/source/llama_cpp/llama_cpp.py", "llama.cpp").parent
    build = check_built(peers / f"llama.cpp/build{build_suffix()}/bin/libllama.so", "llama.cpp").parent
    os.environ["LLAMA_CPP_LIB_PATH"] = str(build)
    package = ModuleType("llama_cpp")  # without its __init__, which imports what we do not have
    package.__path__ = [str(source)]
    sys.modules["llama_cpp"] = package
    library: Any = importlib.import_module("llama_cpp.llama_cpp")
    library.silent = library.llama_log_callback(lambda level, text, data: None)  # kept: C calls it
    library.llama_log_set(library.silent, None)
    library.llama_backend_init()
    model = library.llama_model_load_from_file(os.fsencode(file), library.llama_model_default_params())
    if not model:
        raise ValueError(f"{file}: llama.cpp does not load it")
    vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    options = library.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = window
    options.n_threads = options.n_threads_batch = threads
    context, batch = library.llama_init_from_model(model, options), library.llama_batch_init(window, 0, 1)

    def logits(ids: Sequence[int]) -> Tensor:
        library.llama_memory_clear(library.llama_get_memory(context), True)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        if status := library.llama_decode(context, batch):
            raise ValueError(f"llama.cpp: llama_decode returned {status}")
        address = ctypes.cast(library.llama_get_logits(context), ctypes.c_void_p).value
        assert address is not None
        values = (ctypes.c_float * (len(ids) * vocabulary)).from_address(address)
        return torch.frombuffer(values, dtype=torch.float32).view(len(ids), -1).clone()

    return logits


def make_way(name: str, config: PerplexityConfig) -> Way:
    """Return the way of that name. Raises ValueError for a name that is none, and for what the target cannot do."""
    if name == "llama.cpp":
        file = resolve_checkpoint(config.model.path_or_hub_id, config.model.revision)
        if not is_gguf(file):
            raise ValueError(f"ways={name}: llama.cpp reads GGUF files only, and {file} is none")
        return llama_cpp(resolve_path(config.peers), file, config.window, torch.get_num_threads())
    weights, *words = name.split(":")
    if len(words) > 2:
        raise ValueError(f"ways={name}: must be weights[:activations[:dtype]] or llama.cpp")
    activations, dtype, *_ = *words, *("same", config.dtype)[len(words) :]
    if dtype not in DTYPES:
        raise ValueError(f"ways={name}: dtype {dtype} must be one of {', '.join(DTYPES)}")
    engine = EngineConfig(weights=weights, activations=activations)
    return our_way(replace(config.model, dtype=dtype), engine, config.window)


def windows_of(config: PerplexityConfig) -> list[list[int]]:
    """Return the text's first tokens in whole windows. Raises ValueError if there is no text, or too short a one."""
    if not config.text:
        raise ValueError("text=: must be given, a file in UTF-8, maybe compressed (.xz)")
    file = resolve_path(config.text)
    data = file.read_bytes()
    text = (lzma.decompress(data) if file.suffix == ".xz" else data).decode("utf-8")
    tokenizer = Tokenizer.load(resolve_checkpoint(config.model.path_or_hub_id, config.model.revision))
    ids = tokenizer.encode(text)[: config.tokens]
    if len(ids) < config.tokens:
        raise ValueError(f"text={config.text}: holds {len(ids)} tokens; tokens={config.tokens}")
    return [ids[start : start + config.window] for start in range(0, len(ids) - config.window + 1, config.window)]


@entry_point("perplexity", PerplexityConfig)
@torch.no_grad()
def main(config: PerplexityConfig) -> None:
    windows = windows_of(config)
    ways = {name: make_way(name, config) for name in config.ways}
    scores = {name: Scores() for name in ways}
    for ids in windows:
        reference = ways[config.ways[0]](ids)
        for name, way in ways.items():
            add_window(scores[name], reference if name == config.ways[0] else way(ids), reference, ids)
    results = {name: score.summary() for name, score in scores.items()}
    rows = [[name, *(f"{value:.5g}" for value in result.values())] for name, result in results.items()]
    header = ["way", "perplexity", "KL, mean", "±", "KL, 99 %", "largest", "same likeliest token"]
    print(markdown(header, rows, pad=True), end="")
    tokens = sum(len(ids) - 1 for ids in windows)
    report = {"machine": describe_machine(), "tokens": tokens, "window": config.window, "ways": results}
    publish(report, config.save, config.model.name)
