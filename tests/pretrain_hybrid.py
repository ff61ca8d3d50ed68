"""Makes a small hybrid on real text, since no package has weights of one: for measurements, not for tests.

    python -m tests.pretrain_hybrid OUT [lfm2 | qwen3.5] [STEPS]

It has the demo target's sizes, tokenizer and, where shapes agree, weights; ten of its sixteen layers are short
convolutions, or twelve gated delta nets. It learns the demo's distribution and the next token of the demo's corpus. 200
steps of the first take four minutes on two idle cores.
"""

from __future__ import annotations

import math
import re
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Lfm2Config, LlamaForCausalLM, Qwen3_5TextConfig

from models.demo.corpus import Split, read_split
from models.targets import lfm2, qwen3_5
from models.tokenizer import Tokenizer
from tests.unit.test_layout import ROOT

DEMO = ROOT / "models" / "demo"
BATCH_TOKENS, WARM_UP, COOL_DOWN = 1536, 30, 0.4
SIZES = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": True, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
LFM2 = {
    "norm_eps": 1e-5,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
}
QWEN = {
    "rms_norm_eps": 1e-5, "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "rope_parameters": {**SIZES["rope_parameters"], "partial_rotary_factor": 0.5},
}  # fmt: skip
FAMILIES = {  # config, and Llama's names -> the family's
    "lfm2": (Lfm2Config(**SIZES | LFM2), lfm2.NAMES),
    "qwen3.5": (Qwen3_5TextConfig(**SIZES | QWEN), qwen3_5.NAMES),
}


def stream(tokenizer: Tokenizer, split: Split) -> Tensor:
    return torch.tensor([token for document in read_split(split) for token in (0, *tokenizer.encode(document.text))])


def start(teacher: nn.Module, family: str) -> nn.Module:
    """Return a model with the teacher's weights where it has such; other matrices are drawn."""
    config, names = FAMILIES[family]
    model, weights = AutoModelForCausalLM.from_config(config, dtype=torch.float32), {}
    for name, value in teacher.state_dict().items():
        for ours, theirs in names.items():
            name = re.sub(ours, theirs, name)
        weights[name] = value.float() - float(family == "qwen3.5" and "norm" in name)  # a scale of 1 + w there
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name in weights and weights[name].shape == value.shape:
                value.copy_(weights[name])
            elif value.ndim == 2:
                nn.init.normal_(value, std=0.02 / (math.sqrt(32) if "out_proj" in name else 1))
    return model


def train(model: nn.Module, teacher: nn.Module, text: Tensor, steps: int) -> None:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.02)
    optimizers = [muon, torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)]
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    for step in range(steps):
        for group, rate in groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARM_UP, (steps - step) / (COOL_DOWN * steps))
        length, generator = 512 if step > 0.85 * steps else 256, torch.Generator().manual_seed(step)
        first = torch.randint(0, len(text) - length, (BATCH_TOKENS // length, 1), generator=generator)
        ids = text[first + torch.arange(length + 1)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                wanted = teacher(ids[:, :-1]).logits
            logits = model(ids[:, :-1]).logits
        logits, wanted = (x.float().flatten(0, 1).log_softmax(-1) for x in (logits, wanted))
        distance = F.kl_div(logits, wanted, log_target=True, reduction="batchmean")
        (0.5 * F.nll_loss(logits, ids[:, 1:].flatten()) + distance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 9:
            print(f"step {step + 1} of {steps}: {distance.item():.3f} nats from the demo target", flush=True)


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, length: int = 256, windows: int = 64) -> float:
    first, losses = torch.linspace(0, len(text) - length - 1, windows).long()[:, None], []
    for rows in first.split(8):
        ids = text[rows + torch.arange(length + 1)]
        losses.append(F.cross_entropy(model(ids[:, :-1]).logits.float().flatten(0, 1), ids[:, 1:].flatten()))
    return torch.stack(losses).mean().item()


def main(out: Path, family: str = "lfm2", steps: str = "200") -> None:
    torch.manual_seed(0)
    tokenizer, teacher = Tokenizer.load(DEMO), LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).eval()
    model = start(teacher, family)
    train(model, teacher, stream(tokenizer, "train"), int(steps))
    model = model.to(torch.bfloat16)
    print(f"held out: {held_out_loss(model, stream(tokenizer, 'held_out')):.3f} nats")
    model.save_pretrained(out)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, out / file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
