"""Runs in the trainers' environment, without Headway: makes heads with speculators' own classes, and computes logits.

use_speculators.py make TARGET FOLDER   heads for TARGET with the defaults of its training command, and others
use_speculators.py logits FOLDER ...    logits of each head, of the inputs in FOLDER.inputs.safetensors
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.model import SpeculatorModel
from speculators.models.attention import create_float_mask
from speculators.models.dflash import core as dflash
from speculators.models.dflash2 import core as dflash2
from speculators.models.dspark import core as dspark
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.mtp.core import MTPDraftModel
from speculators.models.peagle import core as peagle
from speculators.models.xpress.core import XPressDraftModel
from speculators.train.cli import create_transformer_layer_config
from torch import Tensor

DRAFT_VOCAB, STEPS, MASK = 96, 3, 7
EAGLE3 = {"norm_before_fc": True, "norm_output": True}  # the training command's defaults, which are not the class's
# name -> class, family of the layers, their number and window, and options
MADE: dict[str, tuple[Any, str, int, int, dict[str, Any]]] = {
    "eagle3": (Eagle3DraftModel, "llama", 1, 2048, EAGLE3),
    "eagle3, window of 7": (Eagle3DraftModel, "llama", 1, 7, EAGLE3),
    "eagle3, Qwen3's layers": (Eagle3DraftModel, "qwen3", 2, 7, EAGLE3),
    "eagle3, the final state": (Eagle3DraftModel, "llama", 1, 2048, {"target_layer_ids": [2, 4, 8]}),
    "peagle": (peagle.PEagleDraftModel, "qwen3", 1, 2048, {"num_depths": 8}),
    "peagle, window of 9": (peagle.PEagleDraftModel, "qwen3", 1, 9, {"num_depths": 8}),
    "peagle, Llama's layers": (peagle.PEagleDraftModel, "llama", 2, 9, {"num_depths": 8}),
    "dflash": (dflash.DFlashDraftModel, "qwen3", 5, 2048, {}),
    "dspark": (dspark.DSparkDraftModel, "qwen3", 5, 2048, {}),
    "dflash2": (dflash2.DFlash2DraftModel, "qwen3", 5, 2048, {}),
    "xpress": (XPressDraftModel, "qwen3", 5, 2048, {}),
}


class Captured(Exception):
    """The logits are known: the loss is not needed."""


def make(target: str, folder: Path) -> None:
    d2t = 3 * torch.arange(DRAFT_VOCAB)  # every fourth token
    t2d = torch.zeros(4 * DRAFT_VOCAB, dtype=torch.bool)
    t2d[::4] = True
    for name, (kind, family, layers, window, more) in MADE.items():
        layer = create_transformer_layer_config(target, layers, family, None, window, [])
        options = {"norm_before_residual": True, "ttt_steps": STEPS, "mask_token_id": MASK, "draft_attn_impl": "eager"}
        options |= {"verifier_name_or_path": target, "draft_vocab_size": DRAFT_VOCAB} | more
        if kind is dflash2.DFlash2DraftModel:
            options["draft_vocab_size"] = 4 * DRAFT_VOCAB
        model = kind.from_training_args(layer, t2d=t2d, d2t=d2t, **options)
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():  # larger than at a start, so that differences show
            if parameter.ndim > 1 and parameter.requires_grad:
                parameter.data.normal_(std=0.2, generator=generator)
        model.save_pretrained(folder / name)


def logits_of(folder: Path) -> Tensor:
    """Return the logits `[T, K, Vd]` of every slot and depth, NaN where the trainer computes none."""
    model: Any = SpeculatorModel.from_pretrained(str(folder)).eval()
    if isinstance(model, Eagle3DraftModel | dflash.DFlashDraftModel):  # flex attention is for a GPU
        model._attn_impl, model._create_mask_fn = "eager", create_float_mask
        model.config.transformer_layer_config._attn_implementation = "eager"
    inputs = load_file(f"{folder}.inputs.safetensors")
    ids, features = inputs["ids"][None], inputs["features"][None]
    length = ids.shape[1]
    if isinstance(model, MTPDraftModel):
        return placed(length, [logits[0] for logits in model(ids, features)[0]])
    documents, width = torch.zeros_like(ids), features.shape[-1]
    shared = {"loss_mask": torch.ones_like(ids), "verifier_last_hidden_states": features[..., : model.hidden_size]}
    if isinstance(model, peagle.PEagleDraftModel):
        call = {"hidden_states": features[:, :-1], "input_ids": ids[:, 1:], "document_ids": documents[:, 1:]}
        call |= {key: value[:, 1:] for key, value in shared.items()} | {"num_depths": 8}
        parts = captured(peagle, model, down_sample_ratio=1.0, down_sample_ratio_min=1.0, **call)
        out = torch.full((length, 8, model.draft_vocab_size), torch.nan)
        sampled = parts["anchor_pos"] >= 0  # of depth 1 position 0 is sampled too, which follows no slot
        out[parts["anchor_pos"][sampled], parts["depth"][sampled]] = parts["logits"][0, sampled]
        return out
    if isinstance(model, Eagle3DraftModel):
        taken: list[Tensor] = []
        model.lm_head.register_forward_hook(lambda module, inputs, output: taken.append(output[0].clone()))
        model(features[:, :-1], ids[:, 1:], documents[:, 1:], ttt_steps=STEPS)
        return placed(length, [logits[: length - 1 - step] for step, logits in enumerate(taken)])
    assert width == model.fc.in_features
    block = model.block_size
    anchors = torch.arange(1, length - block)
    dflash.select_anchors = lambda loss_mask, count, size: (anchors, torch.ones(len(anchors), dtype=torch.bool))
    core = sys.modules[type(model).__module__]
    parts = captured(core, model, features, ids, document_ids=documents, max_anchors=len(anchors), **shared)
    rows = parts.get("logits", parts.get("unary_logits"))[0].unflatten(0, (-1, block))
    rows = rows if model.config.sample_from_anchor else rows[:, 1:]
    out = torch.full((length, *rows.shape[1:]), torch.nan)
    out[anchors - 1] = rows
    return out


def captured(core: Any, model: Any, *args: Any, **call: Any) -> dict[str, Tensor]:
    """Call the model up to its loss, and return what that is computed from."""
    parts: dict[str, Tensor] = {}

    def stop(*tensors: Tensor, **named: Tensor) -> None:
        parts.update({"logits": tensors[0]} if tensors else {}, **named)
        raise Captured

    core.compute_metrics = stop
    try:
        model(*args, **call)
    except Captured:
        return parts
    raise AssertionError("the loss was not computed")


def placed(length: int, depths: list[Tensor]) -> Tensor:
    out = torch.full((length, len(depths), depths[0].shape[-1]), torch.nan)
    for depth, logits in enumerate(depths):
        out[: len(logits), depth] = logits
    return out


@torch.no_grad()
def main(command: str, *words: str) -> None:
    if command == "make":
        make(words[0], Path(words[1]))
        return
    for folder in words:
        result: dict[str, Any] = {"folder": folder, "error": None}
        try:
            save_file({"logits": logits_of(Path(folder))}, f"{folder}.logits.safetensors")
        except Exception as error:  # each head is a result of its own
            result["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            traceback.print_exc()
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
