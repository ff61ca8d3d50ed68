"""Targets and heads to check and measure with: the demo target, and random ones of a large or a tiny shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from infer.settings.paths import REPO_ROOT
from models.config import ATTENTION, RECURRENT, RecurrentConfig, TargetConfig, read_json
from models.heads import HEADS
from models.heads.base import Head
from models.heads.eagle3.config import Eagle3Options
from models.heads.eagle3.head import Eagle3Head
from models.heads.weights import initialize, set_vocabulary
from models.targets.llama import LlamaTarget
from models.targets.qwen3_5 import Qwen35Target
from models.vocab import build_draft_vocab

Module = TypeVar("Module", bound=nn.Module)
DEMO = REPO_ROOT / "models" / "demo"
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_layers": 3, "num_heads": 2,
        "num_kv_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
    },
    "llama3.1-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32, "num_heads": 32,
        "num_kv_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "tiny hybrid": {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 48, "num_layers": 3, "num_heads": 2,
        "num_kv_heads": 1, "head_dim": 64, "rotary_dim": 32, "max_position_embeddings": 128,
        "recurrent": RecurrentConfig(2 * 2 * 48 + 6 * 32, 4, heads=6, groups=2, key_size=48, value_size=32),
    },
    "hybrid": {  # as Qwen3.5-0.8B, of three layers
        "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584, "num_layers": 3, "num_heads": 8,
        "num_kv_heads": 2, "head_dim": 256, "rotary_dim": 64, "max_position_embeddings": 262144,
        "recurrent": RecurrentConfig(3 * 16 * 128, 4, heads=16, groups=16, key_size=128, value_size=128),
    },
}  # fmt: skip
GATED = {  # of Qwen3.5: gated delta nets around a layer of attention
    "qk_norm": True, "output_gate": True, "centered_norms": True, "mixers": (RECURRENT, ATTENTION, RECURRENT),
}  # fmt: skip


def config_of(shape: str) -> TargetConfig:
    """Return the config of one of SHAPES, with the demo target's constants."""
    return replace(TargetConfig.from_json(read_json(DEMO / "config.json")), **SHAPES[shape])


def random_target(shape: str, dtype: torch.dtype, device: torch.device) -> LlamaTarget:
    return randomised(LlamaTarget, config_of(shape), dtype, device)


def random_hybrid(shape: str, dtype: torch.dtype, device: torch.device) -> LlamaTarget:
    return randomised(Qwen35Target, replace(config_of(shape), **GATED), dtype, device)


def random_head(target: LlamaTarget, draft_vocab_size: int) -> Eagle3Head:
    """Return a random head, created on the target's device: a large one would take a minute on a CPU."""
    aux = [0, 1, 2] if target.config.num_layers < 8 else None
    config = Eagle3Options(draft_vocab_size=draft_vocab_size, aux_layers=aux).for_target(target.config)
    weight = target.embedding_weight
    return randomised(Eagle3Head, config, weight.dtype, weight.device)


def taught_head(target: LlamaTarget) -> Eagle3Head:
    """Return a head initialized from the weights of `target`, on a CPU and not packed; some of its drafts are right."""
    aux = [0, 1, 2] if target.config.num_layers < 8 else None
    head = Eagle3Head(Eagle3Options(aux_layers=aux).for_target(target.config))
    initialize(head, target, from_target=True)
    return head.requires_grad_(False)


def untaught_head(kind: str, target: LlamaTarget) -> Head:
    """Return a new head of this kind for the unpacked `target`, initialized as training does."""
    options = HEADS[kind]()
    head = options.make(target.config)
    counts = torch.arange(target.config.vocab_size, 0, -1)
    set_vocabulary(head, *build_draft_vocab(counts, head.config.draft_vocab_size, []))
    initialize(head, target, from_target=options.starts_from_target)
    return head.requires_grad_(False)


def randomised(kind: Callable[[Any], Module], config: Any, dtype: torch.dtype, device: torch.device) -> Module:
    """Return a module of this kind with random matrices, for inference."""
    with torch.device("meta"):
        module = kind(config)
    module = module.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02 if parameter.shape[1] > 1000 else 0.1, generator=generator)
    for name, buffer in module.named_buffers():  # of a head: the draft vocabulary is the first token ids
        buffer.copy_(torch.arange(len(buffer)) < config.draft_vocab_size if name == "t2d" else torch.zeros(len(buffer)))
    if isinstance(module, LlamaTarget) and module.config.tie_word_embeddings:
        module.lm_head.weight = module.embed_tokens.weight
    return module.eval().requires_grad_(False)
