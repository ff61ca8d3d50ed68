"""Every head of the registry with every flag, for parametrised tests on tiny targets.

A head without an entry in VARIANTS is tested with its default options.
"""

from __future__ import annotations

from typing import Any

import torch

from models.config import RopeConfig, TargetConfig
from models.heads import HEADS
from models.heads.base import Head
from models.heads.weights import initialize, module_of, set_vocabulary
from models.targets.llama import LlamaTarget
from models.vocab import build_draft_vocab
from train.config import SCHEMAS
from train.data.sequences import Sequences
from train.features.online import compute_features
from train.features.teacher import teach
from train.objectives.base import Objective
from train.objectives.registry import OBJECTIVES

DRAFT_VOCAB = 200
# The first variant of each head is served, and drafts five tokens or more.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle, fc with bias": ("eagle", {"bias": True}),
    "eagle, the target's embedding": ("eagle", {"own_embedding": False}),
    "eagle3": ("eagle3", {"draft_vocab_size": DRAFT_VOCAB}),
    "eagle3, the target's embedding": ("eagle3", {"draft_vocab_size": DRAFT_VOCAB, "own_embedding": False}),
    "eagle3, whole vocabulary": ("eagle3", {}),
    "eagle3, norm_before_residual": ("eagle3", {"norm_before_residual": True}),
    "eagle3, norm_before_fc": ("eagle3", {"norm_before_fc": True}),
    "eagle3.1": ("eagle3", {"fc_norm": True, "norm_output": True}),
    "eagle3, two layers": ("eagle3", {"num_layers": 2}),
    "eagle3, four features": ("eagle3", {"aux_layers": [0, 3, 5, 7]}),
    "eagle3, sizes of its own": (
        "eagle3",
        {"hidden_size": 48, "intermediate_size": 80, "num_heads": 6, "num_kv_heads": 3, "head_dim": 8},
    ),
    "eagle3, trained embedding": ("eagle3", {"embed_requires_grad": True}),
    "eagle3, window": ("eagle3", {"window": 12, "draft_vocab_size": DRAFT_VOCAB}),
    "eagle3, windows of Qwen3's layers": (
        "eagle3",
        {"window": 9, "qk_norm": True, "num_layers": 2, "norm_output": True},
    ),
    "eagle3, the final state": ("eagle3", {"aux_layers": [2, 4, 8]}),
    "mtp": ("mtp", {}),
    "mtp, hidden first, centered norms": ("mtp", {"hidden_first": True, "centered_norms": True, "zero_first": True}),
    "mtp, states before norms": ("mtp", {"pre_norm": True, "norm_recycled": False, "zero_first": False}),
    "mtp, three modules": ("mtp", {"num_modules": 3, "norm_recycled": False, "centered_norms": True}),
    "medusa": ("medusa", {"num_heads": 5}),
    "medusa, two layers": ("medusa", {"num_heads": 5, "num_layers": 2}),
    "medusa, no bias": ("medusa", {"num_heads": 5, "bias": False}),
    "medusa, shared": ("medusa", {"num_heads": 5, "shared": True}),
    "medusa, truncated": ("medusa", {"num_heads": 5, "draft_vocab_size": DRAFT_VOCAB}),
    "medusa, shared and truncated": ("medusa", {"num_heads": 5, "shared": True, "draft_vocab_size": DRAFT_VOCAB}),
    "mlp": ("mlp", {"n_predict": 5}),
    "mlp, tied": ("mlp", {"n_predict": 5, "tie_weights": True}),
    "mlp, one head": ("mlp", {"n_predict": 1, "tie_weights": True}),
    "mlp, inner_dim": ("mlp", {"n_predict": 5, "inner_dim": 96}),
    "mlp, scale_input": ("mlp", {"n_predict": 5, "scale_input": True}),
    "lstm": ("lstm", {"n_predict": 5}),
    "lstm, untied": ("lstm", {"n_predict": 5, "tie_lstm_embs": False, "scale_input": False, "inner_dim": [80]}),
    "lstm, stacks": ("lstm", {"n_predict": 5, "method": "sum_rnn", "inner_dim": [48, 80], "emb_layers": 2}),
    "lstm, deep projections": (
        "lstm",
        {"n_predict": 5, "method": "sum_rnn", "proj_layers": 2, "tie_weights": False, "scale_input": False},
    ),
    "p-eagle, one layer": ("p-eagle", {"num_layers": 1, "mask_token_id": 7, "embed_requires_grad": False}),
    "p-eagle": ("p-eagle", {"draft_vocab_size": DRAFT_VOCAB, "num_layers": 4}),
    "p-eagle, window": ("p-eagle", {"num_layers": 2, "window": 9, "qk_norm": True, "draft_vocab_size": DRAFT_VOCAB}),
    "dflash": ("dflash", {"num_layers": 2, "block_size": 6}),
    "dflash, one layer": ("dflash", {"num_layers": 1, "block_size": 6, "mask_token_id": 7}),
    "dflash, causal": ("dflash", {"num_layers": 2, "block_size": 6, "causal": True, "draft_vocab_size": DRAFT_VOCAB}),
    "dflash, window": ("dflash", {"num_layers": 2, "block_size": 6, "window": 12}),
    "dflash, causal window": ("dflash", {"num_layers": 2, "block_size": 6, "window": 12, "causal": True}),
    "dflash, from the anchor": ("dflash", {"num_layers": 1, "block_size": 5, "sample_from_anchor": True}),
    "dspark": ("dspark", {"num_layers": 2, "block_size": 5, "markov_rank": 32}),
    "dspark, gated": ("dspark", {"num_layers": 1, "block_size": 5, "markov_rank": 16, "markov_head_type": "gated"}),
    "dspark, rnn": (
        "dspark",
        {"num_layers": 1, "block_size": 5, "markov_rank": 16, "markov_head_type": "rnn", "draft_vocab_size": 200},
    ),
    "dspark, in place": (
        "dspark",
        {
            "num_layers": 1,
            "block_size": 6,
            "markov_rank": 8,
            "sample_from_anchor": False,
            "confidence_head_with_markov": False,
        },
    ),
    "dspark, no confidence": (
        "dspark",
        {"num_layers": 1, "markov_rank": 8, "enable_confidence_head": False},
    ),
    "dflash2": ("dflash2", {"num_layers": 2, "block_size": 6, "selector_rank": 16}),
    "dflash2, truncated": (
        "dflash2",
        {"num_layers": 1, "block_size": 6, "selector_rank": 16, "selector_top_k": 5, "draft_vocab_size": DRAFT_VOCAB},
    ),
    "p-eagle, norms": ("p-eagle", {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True}),
    "draft-model": ("draft-model", {"num_layers": 2}),
    "draft-model, trained embedding": ("draft-model", {"num_layers": 1, "embed_requires_grad": True}),
}


VARIANTS |= {name: (name, {}) for name in HEADS if name not in {head for head, _ in VARIANTS.values()}}
ONE_OF_EACH = tuple(next(variant for variant, (head, _) in VARIANTS.items() if head == name) for name in HEADS)
WINDOWED = ("eagle3, windows of Qwen3's layers", "p-eagle, window")  # shorter than the texts of the tests
# the default objective, but for the one that learns a tiny batch too slowly
OBJECTIVE_OF = {name: next(iter(head.objectives)) for name, head in HEADS.items()} | {"eagle": "ttt"}


TINY = TargetConfig(
    architecture="LlamaForCausalLM", vocab_size=384, hidden_size=64, intermediate_size=128, num_layers=8, num_heads=4,
    num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5, max_position_embeddings=256, tie_word_embeddings=False,
    attention_bias=False, output_bias=False, mlp_bias=False, rope=RopeConfig(), bos_token_id=None, eos_token_ids=(0,),
)  # fmt: skip


def kind_of(variant: str) -> type[Head]:
    return module_of(VARIANTS[variant][0]).kind


def keeps_kv(variant: str) -> bool:
    name, options = VARIANTS[variant]
    return HEADS[name](**options).for_target(TINY).attention is not None


def make_objective(head: Head, name: str, **settings: Any) -> Objective:
    return OBJECTIVES[name](head, SCHEMAS["objective"][name](name=name, **settings))


def memorise(head: Head, target: LlamaTarget, sequences: Sequences, steps: int, *, rounds: int = 60) -> Head:
    """Train the head on `sequences` until it has nearly memorised them, so that drafts of every length are accepted.

    `target` computes the features and may be packed.
    """
    objective = make_objective(head, OBJECTIVE_OF[head.config.name], steps=steps)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=5e-3)
    batch = sequences.batch(range(len(sequences)))
    features = compute_features(target, batch, head.config.aux_layers)
    teacher = teach(target, features.hidden, batch, head.target_ids)
    denominators = objective.denominators(batch)
    for _ in range(rounds):
        loss, _ = objective(batch, features, teacher, denominators, metrics=False)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head.requires_grad_(False)


def make_head(target: LlamaTarget, variant: str, *, seed: int = 4, **more: Any) -> Head:
    """Return a random head for the unpacked `target`, with noise on parameters that start at one or zero."""
    name, options = VARIANTS[variant]
    if target.config.num_layers < 8 and HEADS[name].fuses_layers:
        more = {"aux_layers": [0, 1, 2]} | more  # the defaults collide on so few layers
    head = HEADS[name](**options | more).make(target.config)
    size = head.config.draft_vocab_size
    set_vocabulary(head, *build_draft_vocab(torch.arange(target.config.vocab_size) % 11, size, [0]))
    initialize(head, target, from_target=False, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim == 1 or "blocks" in name or not parameter.any():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return head
