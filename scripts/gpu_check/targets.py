"""Targets and heads for the checks: the demo target, random ones of a large model's shape, and tiny ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from infer.options.paths import REPO_ROOT
from models.config import TargetConfig, read_json
from models.heads import HEADS
from models.heads.base import Head
from models.heads.eagle3.config import Eagle3Options
from models.heads.eagle3.head import Eagle3Head
from models.heads.weights import initialize, set_vocabulary
from models.targets.llama import LlamaTarget
from models.vocab import build_draft_vocab
from scripts.inflation import SHAPES, Shape
from scripts.inflation.shapes import enlarged

Module = TypeVar("Module", bound=nn.Module)
DEMO = REPO_ROOT / "models" / "demo"
TINY = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_layers": 3, "num_heads": 2}
TINY |= {"num_kv_heads": 1, "head_dim": 16, "max_position_embeddings": 128}
WIDE = Shape(340, 48, 64, 4, 4, 2, 16, 128, tie_word_embeddings=True, draft_vocab_size=320)  # TINY, enlarged


def config_of(shape: str) -> TargetConfig:
    """Return the config of `tiny`, or of one of SHAPES with the demo target's constants."""
    demo = TargetConfig.from_json(read_json(DEMO / "config.json"))
    return replace(demo, **TINY) if shape == "tiny" else enlarged(demo, SHAPES[shape])


def random_target(shape: str, dtype: torch.dtype, device: torch.device) -> LlamaTarget:
    return randomised(LlamaTarget, config_of(shape), dtype, device)


def random_head(target: LlamaTarget, draft_vocab_size: int) -> Eagle3Head:
    """Return a random head, created on the target's device: a large one would take a minute on a CPU."""
    aux = [0, 1, 2] if target.config.num_layers < 8 else None
    config = Eagle3Options(draft_vocab_size=draft_vocab_size, aux_layers=aux).for_target(target.config)
    weight = target.embedding_weight
    return randomised(Eagle3Head, config, weight.dtype, weight.device)


def taught_head(target: LlamaTarget) -> Eagle3Head:
    """Return a head initialised from the weights of `target`, on a CPU and not packed; some of its drafts are right."""
    aux = [0, 1, 2] if target.config.num_layers < 8 else None
    head = Eagle3Head(Eagle3Options(aux_layers=aux).for_target(target.config))
    initialize(head, target, from_target=True)
    return head.requires_grad_(False)


def untaught_head(kind: str, target: LlamaTarget) -> Head:
    """Return a new head of this kind for the unpacked `target`, initialised as training does."""
    options = HEADS[kind]()
    head = options.make(target.config)
    counts = torch.arange(target.config.vocab_size, 0, -1)
    set_vocabulary(head, *build_draft_vocab(counts, head.config.draft_vocab_size, []))
    initialize(head, target, from_target=options.init_from_target)
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


def write_tiny(folder: Path) -> None:
    """Write a random checkpoint of TINY's sizes in Hugging Face's layout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    names = {"layers": "hidden_layers", "heads": "attention_heads", "kv_heads": "key_value_heads"}
    options: dict[str, Any] = {"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0}
    options["initializer_range"] = 0.1
    options.update({"num_" + names[key[4:]] if key.startswith("num_") else key: value for key, value in TINY.items()})
    config = LlamaConfig(**options)
    LlamaForCausalLM(config).save_pretrained(folder)
