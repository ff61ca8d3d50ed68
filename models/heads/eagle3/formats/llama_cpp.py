"""llama.cpp's EAGLE-3: one GGUF file, which models/gguf/head.py reads and writes.

That converts keys and layouts, so a config.json here is SafeAILab's, without what llama.cpp has no forward for.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

from models.fields import Fields
from models.formats import eagle3
from models.formats.checkpoint import Checkpoint, ConversionOptions, Format, ParsedConfig, Shapes
from models.heads.config import EMBEDDING, LM_HEAD, HeadShape
from models.heads.eagle3.config import Eagle3Config
from models.heads.eagle3.formats import safeailab

LAYERS = 3  # of the target, which llama.cpp's encoder expects
NAMES = {
    EMBEDDING: "token_embd.weight",
    LM_HEAD: "output.weight",
    "norm.weight": "output_norm.weight",
    "input_norm.weight": "enc.output_norm.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    """Layer ids are hidden_states, whatever the first of them is: llama.cpp takes the inputs of these layers."""
    return safeailab.read(fields, shapes, replace(provided, layer_ids="hidden_states", norm_output="vllm"))


def spell(name: str, config: HeadShape) -> str:
    match = re.fullmatch(r"layers\.0\.(.+)\.(weight|bias)", name)
    return f"blk.0.{LAYER[match[1]]}.{match[2]}" if match else NAMES.get(name, name)


def write(checkpoint: Checkpoint) -> dict[str, Any]:
    config = cast(Eagle3Config, checkpoint.config)
    layer = config.layer
    for unsupported, message in (
        (layer.num_layers != 1, f"num_hidden_layers={layer.num_layers}: llama.cpp has room for one layer"),
        (
            len(config.aux_layers) != LAYERS,
            f"aux_layers={list(config.aux_layers)}: llama.cpp feeds a head {LAYERS} layers",
        ),
        (config.fc_norm, "fc_norm=true: llama.cpp has no norm per feature"),
        (config.norm_output, "norm_output=true: llama.cpp feeds the state back without a norm"),
        (layer.attention_bias or layer.mlp_bias, "attention_bias, mlp_bias: llama.cpp has no biases in a head"),
    ):
        if unsupported:
            raise ValueError(message)
    return safeailab.write(checkpoint)


FORMAT = Format(
    name="llama.cpp",
    heads=("eagle3",),
    matches=lambda config, files: False,  # a file, not a folder
    read=read,
    write=write,
    spell=spell,
    optional=eagle3.shared_with_target,
    implied=frozenset({"t2d"}),
    blame=((r"attn|ffn", ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")),),
    incoming=eagle3.incoming,
    states_tokens=False,
    gguf=True,
)
