"""Runs in the trainers' environment, without Headway: as use_speculators.py, for heads of SpecForge's own classes.

`make` alone also computes: make TARGET FOLDER writes each head, what it reads and its logits.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from specforge.modeling.draft import DFlashDraftModel, DominoDraftModel, LlamaForCausalLMEagle3
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

LENGTH, STEPS, BLOCK, MASK, LAYERS = 40, 3, 6, 7, (2, 4, 5)
SIZES: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip


def eagle3(head: Any, ids: Tensor, features: Tensor, target: Any) -> Tensor:
    """Return the logits `[T, K, Vd]` of the unrolling that trains it, over shifted tokens."""
    tokens, state, cache = ids[:, 1:], head.project_hidden_states(features[:, :-1]), [[], []]
    out = torch.full((LENGTH, STEPS, head.draft_vocab_size), torch.nan)
    size = {"hidden_states": state, "batch_size": 1, "seq_length": LENGTH - 1, "past_key_values_length": 0}
    mask = head.prepare_decoder_attention_mask(attention_mask=torch.ones(1, LENGTH - 1, dtype=torch.bool), **size)
    for step in range(STEPS):
        embedded = head.embed_input_ids(torch.nn.functional.pad(tokens[:, step:], (0, step)))
        state = head.backbone(embedded, state, cache, mask, torch.arange(LENGTH - 1)[None])
        out[: LENGTH - 1 - step, step] = head.compute_logits(state)[0, : LENGTH - 1 - step]
    return out


def block(head: Any, ids: Tensor, features: Tensor, target: Any) -> Tensor:
    """Return the logits of one block after another; slot i is followed by the block of anchor i + 1."""
    out = torch.full((LENGTH, BLOCK - 1, SIZES["vocab_size"]), torch.nan)
    for anchor in range(1, LENGTH - BLOCK):
        tokens = torch.full((1, BLOCK), MASK)
        tokens[0, 0] = ids[0, anchor]
        parts = {"noise_embedding": target.get_input_embeddings()(tokens), "target_hidden": features[:, :anchor]}
        states = head(position_ids=torch.arange(anchor + BLOCK)[None], **parts)
        out[anchor - 1] = target.lm_head(states)[0, 1:]
    return out


def make(path: str, folder: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(path).eval()
    ids = torch.randint(1, SIZES["vocab_size"], (1, LENGTH), generator=torch.Generator().manual_seed(5))
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in LAYERS], dim=-1)
    flash = {"mask_token_id": MASK, "target_layer_ids": [layer - 1 for layer in LAYERS]}
    domino = flash | {"projector_type": "domino", "emb_dim": 8, "gru_hidden_dim": 16}
    layers = {"num_hidden_layers": 2, "num_target_layers": 8, "block_size": BLOCK, "attn_implementation": "eager"}
    for name, kind, config, logits_of in (
        ("eagle3", LlamaForCausalLMEagle3, LlamaConfig(**SIZES, num_hidden_layers=1, draft_vocab_size=96), eagle3),
        ("dflash", DFlashDraftModel, Qwen3Config(**SIZES, **layers, dflash_config=flash), block),
        ("domino", DominoDraftModel, Qwen3Config(**SIZES, **layers, dflash_config=domino), None),
    ):
        config.architectures = [kind.__name__]
        head: Any = kind(config).eval()
        generator = torch.Generator().manual_seed(0)
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.2, generator=generator)
        if hasattr(head, "t2d"):
            head.d2t.copy_(3 * torch.arange(96))
            head.t2d.copy_(torch.arange(384) % 4 == 0)
        head.save_pretrained(folder / name)
        save_file({"ids": ids[0], "features": features[0]}, f"{folder / name}.inputs.safetensors")
        if logits_of is not None:
            save_file({"logits": logits_of(head, ids, features, target)}, f"{folder / name}.logits.safetensors")


if __name__ == "__main__":
    with torch.no_grad():
        make(sys.argv[2], Path(sys.argv[3]))
