"""The tensors of a GGUF file under the names and in the layout of Hugging Face's checkpoints, each read on demand."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from kernels.weights.ggml import BLOCK, GgmlRows
from kernels.weights.groups import GroupedRows
from models.gguf import hybrid, mamba2
from models.gguf.config import ARCHITECTURE, LONGROPE, ROPE_FREQS
from models.gguf.file import GgufFile, Part
from models.weights import NamedTensors, Rows

GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
OTHERWISE = {  # by architecture
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm", "attn_sinks.weight": "self_attn.sinks"},
    "deepseek2": {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.kv_b_proj",  # with attn_v_b
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    **hybrid.NAMES,
    **mamba2.LAYERS,
}
HEADS = {"attn_q": "attention", "attn_k": "key_value", "attn_v": "key_value"}
KEYS, VALUES = "attn_k_b", "attn_v_b"  # each head's matrices between latent and key, and value, in newer files
PAIRED = ("llama", "granite", "granitehybrid")  # ggml rotates pairs of adjacent rows in these
MIXTURES = (
    *("llama", "qwen3moe", "gpt-oss", "deepseek2", "lfm2moe", "qwen3next", "qwen35moe", "granitehybrid"),
    "nemotron_h_moe",
)
WITH_MODULES = (*hybrid.NAMES, "nemotron_h_moe")  # for multi-token prediction, as blocks after the target's
STARCODER = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
STARCODER_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
STACKED = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
QKV, GATE_UP = "attn_qkv", "ffn_gate_up_exps"
FUSED = {QKV: ("attn_q", "attn_k", "attn_v"), GATE_UP: ("ffn_gate_exps", "ffn_up_exps")}  # one behind another, by rows
# of a weight, by which it is multiplied; of its activations, which are not rounded here
SCALE, INPUT_SCALE = "scale", "input_scale"
NAME = re.compile(rf"(?:blk\.(\d+)\.)?((?:shortconv\.)?\w+)\.(weight|bias|{SCALE}|{INPUT_SCALE})")
BARE = re.compile(r"blk\.\d+\.(ssm_a|ssm_d|ffn_norm)")  # a weight, without that word; the last one of Falcon-H1
WIDE = (".mlp.gate.", ".A_log", ".dt_bias", ".mixer.D", ".mamba.D")  # may be fp32 whatever the model's dtype is


class Source(NamedTuple):
    tensor: str
    part: Part
    change: Callable[[Tensor], Tensor] | None = None
    values: str | None = None  # the tensor of VALUES, where `tensor` is that of KEYS
    scale: Part | None = None  # of the tensor SCALE beside it
    columns: Tensor | None = None  # the order of the columns, in runs
    run: int = 1


class GgufTensors(NamedTensors):
    """Tensors by Hugging Face's name, dequantized to `dtype` on access. Raises ValueError naming an unknown tensor."""

    def __init__(
        self,
        file: GgufFile,
        config: Mapping[str, object],
        dtype: torch.dtype,
        rows: Rows | None = None,
        *,
        progress: bool = False,
    ) -> None:
        """`config` as `config_json` returns it. `rows` selects each tensor's rows; `progress`: show a progress bar."""
        self._file, self._dtype, self._rows = file, dtype, rows
        self._progress = progress
        self._bar: tqdm[NoReturn] | None = None
        self._sources: dict[str, Source] = {}
        architecture = str(file.need(ARCHITECTURE))
        heads = {kind: int(str(config[f"num_{key}_heads"])) for kind, key in HEADS.items()}
        doubled = {"attn_q": 2 * heads["attn_q"]} if architecture in hybrid.QWEN else {}  # by gates
        for name, info in file.tensors.items():
            if name in (ROPE_FREQS, *(LONGROPE.values() if architecture == "phi3" else ())):  # read by config_json
                continue
            if architecture in WITH_MODULES and hybrid.layer_of(name) >= int(str(config["num_hidden_layers"])):
                continue
            layer, kind, part = split_name(file, name)
            if kind == VALUES and architecture == "deepseek2":  # read with KEYS
                continue
            if part in (SCALE, INPUT_SCALE) and beside(name, "weight") in file.tensors:  # read with the weight, or not
                continue
            names = GLOBAL if layer is None else {**LAYER, **OTHERWISE.get(architecture, {})}
            if architecture in hybrid.LFM and layer is None:
                names = {**names, **hybrid.GLOBAL}
            shared, alone = hybrid.OF_RECURRENT
            if architecture in hybrid.QWEN and kind == shared and f"blk.{layer}.{alone}" not in file.tensors:
                names = {key: name for key, name in names.items() if key != shared}
            if architecture == "starcoder":
                names = STARCODER if layer is None else STARCODER_LAYER
            pieces = {kind: (mamba2 if architecture in mamba2.LAYERS else hybrid).shape_of(kind, info.shape)}
            if kind in FUSED and kind not in names and layer is not None:
                pieces = fused_pieces(file, name, kind, heads | doubled)
            experts = layer is not None and architecture in MIXTURES and next(iter(pieces)) in STACKED
            layers = "transformer.h" if architecture == "starcoder" else "model.layers"
            prefix = "" if layer is None else f"{layers}.{layer}."
            scales, first = scales_beside(file, name, part, info.shape[0] if experts else 1), 0
            for piece, shape in pieces.items():
                if experts:
                    step = math.prod(info.shape[1:])
                    self._sources |= {
                        f"{prefix}mlp.experts.{expert}.{STACKED[piece]}.{part}": Source(
                            name, Part(shape[1:], expert * step + first), scale=scales[expert]
                        )
                        for expert in range(shape[0])
                    }
                    first += math.prod(shape[1:])
                    continue
                whole = f"{piece}.{part}"  # has a name of another form
                if part in (SCALE, INPUT_SCALE) or (piece not in names and whole not in names):
                    raise ValueError(f"{file.path}: the tensor {name} is no part of the architecture {architecture}")
                change, columns, run = None, None, 1
                if architecture in hybrid.QWEN:
                    change, columns, run = hybrid.change_of(architecture, piece, config, f"{file.path}: {name}")
                if architecture in PAIRED and piece in heads and piece != "attn_v":
                    if shape[0] % (2 * heads[piece]):
                        raise ValueError(
                            f"{file.path}: {name} {list(info.shape)}: is no pairs of rows for {heads[piece]} heads"
                        )
                    change = rotary_halves(heads[piece])
                elif architecture == "gemma3" and piece.endswith("_norm"):
                    change = without_one
                elif architecture in mamba2.LAYERS and piece == "ssm_a":
                    change = partial(mamba2.logarithm, f"{file.path}: {name}")
                values = values_beside(file, name) if piece == KEYS else None
                source = Source(name, Part(shape, first), change, values, scales[0], columns, run)
                self._sources[prefix + (names.get(whole) or f"{names[piece]}.{part}")] = source
                first += math.prod(shape)

    def __getitem__(self, name: str) -> Tensor:
        tensor, part, change, values, scale, columns, _ = self._sources[name]
        # changed in fp32, so that it is rounded only once; a router may compute in fp32 whatever the model's dtype is
        changed = change is not None or scale is not None
        wide = any(word in name for word in WIDE)
        value = self._file.read(tensor, torch.float32 if changed or wide else self._dtype, part)
        if scale is not None:
            value *= self._file.read(beside(tensor, SCALE), torch.float32, scale)
        if change is not None:
            value = change(value)
        value = value.to(self._dtype) if changed and not wide else value
        value = value if columns is None else value[:, columns]
        if values is not None:
            value = join_heads(value, self._file.read(values, self._dtype))
        self._advance_progress()
        row_range = None if self._rows is None else self._rows(name, len(value))
        return value if row_range is None else value[row_range[0] : row_range[1]].clone()

    def shape(self, name: str) -> Sequence[int]:
        _, (shape, _), _, values, *_ = self._sources[name]
        return shape if values is None else (shape[0] * (shape[2] + self._file.tensors[values].shape[1]), shape[1])

    def blocks(self, name: str) -> GgmlRows | None:
        tensor, part, change, values, scale, columns, run = self._sources[name]
        rows = None if values or scale else self._file.blocks(tensor, part)
        if rows is None or (columns is not None and run % BLOCK[rows.ggml_format]):
            return None
        if columns is not None:
            size = BLOCK[rows.ggml_format]
            blocks = rows.data.unflatten(1, (len(columns) // size, -1))
            rows = replace(rows, data=blocks[:, columns[::size] // size].flatten(1))
        self._advance_progress()
        order = None if change is None else change(torch.arange(len(rows.data)))
        row_range = None if self._rows is None else self._rows(name, len(rows.data))
        if row_range is not None:
            order = (torch.arange(len(rows.data)) if order is None else order)[slice(*row_range)]
        return replace(rows, order=order)

    def groups(self, name: str) -> GroupedRows | None:
        tensor, part, _, values, scale, columns, _ = self._sources[name]
        return None if values or scale or columns is not None else self._file.groups(tensor, part)

    def release(self) -> None:
        self._file.release()

    def _advance_progress(self) -> None:
        if not self._progress:
            return
        if self._bar is None:
            name = f"reading {self._file.path.name}"
            self._bar = tqdm(total=len(self), desc=name, unit="tensor", disable=None, dynamic_ncols=True, leave=False)
        self._bar.update()
        if self._bar.n >= len(self):
            self._bar.close()
            self._progress = False


def split_name(file: GgufFile, name: str) -> tuple[int | None, str, str]:
    """Split `blk.3.attn_q.weight` into 3, "attn_q", "weight". Raises ValueError for a name of another form."""
    match = NAME.fullmatch(f"{name}.weight" if BARE.fullmatch(name) else name)
    if match is None:
        raise ValueError(f"{file.path}: the tensor {name} is not known")
    return None if match[1] is None else int(match[1]), match[2], match[3]


def fused_pieces(file: GgufFile, name: str, kind: str, heads: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a fused one holds, in their order. Raises ValueError if it is no such sum.

    `heads`: their number in each of attn_q, attn_k and attn_v.
    """
    shape, kinds = file.tensors[name].shape, FUSED[kind]
    stacked, weights = kind == GATE_UP, [heads[piece] if kind == QKV else 1 for piece in kinds]
    if len(shape) <= stacked or shape[stacked] % sum(weights):
        raise ValueError(f"{file.path}: {name} {list(shape)}: is no {', '.join(kinds)} one behind another")
    rows = shape[stacked] // sum(weights)
    return {
        piece: (*shape[:stacked], rows * weight, *shape[stacked + 1 :])
        for piece, weight in zip(kinds, weights, strict=True)
    }


def beside(name: str, part: str) -> str:
    """Return the name of another part of a tensor's layer: its weight, bias or scale."""
    return f"{name.rpartition('.')[0]}.{part}"


def scales_beside(file: GgufFile, name: str, part: str, count: int) -> list[Part | None]:
    """Return where the scale of each of `count` matrices is in the tensor SCALE beside a weight; None: it has none.

    llama.cpp's converter writes them beside NVFP4. Raises ValueError unless there is one of all or one of each.
    """
    scale = beside(name, SCALE)
    if part != "weight" or scale not in file.tensors:
        return [None] * count
    shape = file.tensors[scale].shape
    if math.prod(shape) not in (1, count):
        raise ValueError(f"{file.path}: {scale} {list(shape)}: must be one number, or {count}")
    return [Part((1,), place % math.prod(shape)) for place in range(count)]


def rotary_halves(heads: int) -> Callable[[Tensor], Tensor]:
    """Return a function that reorders the rows of a query or key projection within each head.

    ggml's rotary embedding rotates pairs of adjacent rows, Hugging Face's pairs half a head apart.
    """

    def change(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    return change


def rotary_pairs(heads: int) -> Callable[[Tensor], Tensor]:
    """Return the inverse of `rotary_halves`."""

    def change(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)

    return change


def values_beside(file: GgufFile, keys: str) -> str:
    """Return the tensor of VALUES for one of KEYS. Raises ValueError unless both have a matrix for every head."""
    values = keys.replace(KEYS, VALUES)
    first, second = (file.tensors[name].shape if name in file.tensors else () for name in (keys, values))
    if len(first) != 3 or len(second) != 3 or first[:2] != (second[0], second[2]):
        raise ValueError(
            f"{file.path}: {keys} {list(first)}, {values} {list(second)}: must have a matrix for every head"
        )
    return values


def join_heads(keys: Tensor, values: Tensor) -> Tensor:
    """Return each head's matrices `[heads * (key + value), rank]` for `[heads, rank, key]`, `[heads, value, rank]`."""
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def without_one(weight: Tensor) -> Tensor:
    """Return the weight of a Gemma norm, which scales by 1 + weight; files of this format store the sum."""
    return weight - 1
