"""SafeAILab's EAGLE-3, a flat LlamaConfig and `midlayer.*`, and llama.cpp's, a GGUF file (models/gguf/head.py).

SpecForge writes the former too, with flags that vLLM reads. Readers disagree on what the layer ids count and on what
norm_output does; where a file leaves this ambiguous, the user must specify it (ConversionOptions). Of a GGUF file keys
and layouts are converted to those of the former, without what llama.cpp has no forward for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, cast

from models.fields import Fields
from models.formats import eagle3, speculators
from models.formats.checkpoint import Checkpoint, ConversionOptions, Format, ParsedConfig, Shapes
from models.formats.llama import read_layer
from models.heads.config import EMBEDDING, LM_HEAD, HeadShape
from models.heads.eagle3.config import FLAGS, Eagle3Config
from models.heads.layer_config import layer_json

SPECFORGE = "LlamaForCausalLMEagle3"
ARCHITECTURES = ("LlamaForCausalLM", SPECFORGE, "Eagle3LlamaForCausalLM")
FIRST_LAYER, MIDLAYER = "layers.0.", "midlayer."
KEYS = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")  # which no other flat config has


def matches(config: Mapping[str, Any], files: Collection[str]) -> bool:
    flat = "speculators_model_type" not in config and "medusa_num_heads" not in config
    named = any(name in ARCHITECTURES[1:] for name in config.get("architectures") or ())
    return flat and (named or any(key in config for key in KEYS))


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    notes: list[str] = []
    architecture = (fields.maybe("architectures", list) or ARCHITECTURES)[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"config.json: architectures={[architecture]}: one of {', '.join(ARCHITECTURES)}")
    fields.only("model_type", "llama")
    layer = read_layer(fields, notes)
    if layer.num_layers != 1:
        raise ValueError(f"config.json: num_hidden_layers={layer.num_layers}: this format has one, midlayer")
    for key in ("bias", "parallel_drafting"):
        fields.only(key, False)
    fields.only("logit_scale", 1.0, 1)
    draft_vocab_size = fields.size("draft_vocab_size", layer.vocab_size)
    fields.only("truncated_vocab_size", draft_vocab_size)
    fields.only("target_vocab_size", layer.vocab_size)
    config = Eagle3Config(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        aux_layers=eagle3.read_aux_layers(fields, provided, notes, raw=True),
        target_hidden_size=fields.size("target_hidden_size", layer.hidden_size),
        norm_before_residual=fields.take("norm_before_residual", bool, False),
        **(eagle3.read_flags(fields, notes) | read_norm_output(fields, architecture, provided, notes)),
    )
    return ParsedConfig(config, notes=notes)


def read_norm_output(
    fields: Fields, architecture: str, provided: ConversionOptions, notes: list[str]
) -> dict[str, bool]:
    """Interpret norm_output: {} for vLLM's meaning. Raises ValueError when it is ambiguous or has no equivalent."""
    stated = fields.maybe("norm_output", bool)
    if stated is None and provided.norm_output is not None:
        raise ValueError(f"--norm-output {provided.norm_output}: config.json has no norm_output")
    if stated is None or provided.norm_output == "vllm":
        return {}
    if architecture == SPECFORGE and provided.norm_output is None:
        raise ValueError(
            f"config.json: norm_output={stated}: feeds the normed state back (vLLM, and SpecForge since September "
            "2026), or has the LM head read it (SpecForge before)? Convert with --norm-output vllm or "
            "--norm-output specforge"
        )
    if provided.norm_output == "specforge":
        if not stated:
            raise ValueError("config.json: norm_output=False: a head whose LM head reads the state without a norm")
        notes.append("norm_output=true is SpecForge's of before September 2026: false here, nothing is fed back normed")
        return {"norm_output": False}
    return {}


def spell(name: str, config: HeadShape) -> str:
    return name.replace(FIRST_LAYER, MIDLAYER, 1) if name.startswith(FIRST_LAYER) else name


def write(checkpoint: Checkpoint) -> dict[str, Any]:
    config = cast(Eagle3Config, checkpoint.config)
    if config.layer.num_layers != 1:
        raise ValueError(f"num_hidden_layers={config.layer.num_layers}: safeailab-eagle3 has room for one layer")
    if config.layer.windows or config.layer.qk_norm:
        raise ValueError("sliding_window, q_norm, k_norm: only the speculators format has such layers")
    return layer_json(config.layer) | {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **{flag: getattr(config, flag) for flag in FLAGS},
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "num_aux_hidden_states": len(config.aux_layers),
    }


def losses(checkpoint: Checkpoint) -> list[str]:
    config = cast(Eagle3Config, checkpoint.config)
    enabled = [flag for flag in FLAGS if getattr(config, flag)]
    notes = [f"SafeAILab's own code does not know {', '.join(enabled)}; vLLM does"] if enabled else []
    default = checkpoint.verifier and checkpoint.verifier.default_aux_layers
    if config.aux_layers != default:
        notes.append(
            f"SafeAILab's own code reads layers (2, N//2, N-3) of its target, whatever config.json says; "
            f"this head wants {list(config.aux_layers)}"
        )
    if config.embed_requires_grad:
        notes.append("the format does not say that the token embedding was trained (embed_requires_grad)")
    if config.aux_layers[0] == 1:
        notes.append("SGLang adds 1 to layer ids that begin with 1")
    return notes


FORMAT = Format(
    name="safeailab-eagle3",
    heads=("eagle3",),
    matches=matches,
    read=read,
    write=write,
    spell=spell,
    aliases=((FIRST_LAYER, MIDLAYER),),
    optional=eagle3.shared_with_target,
    unstated=frozenset({"embed_requires_grad"}),
    blame=((r"^midlayer\.", ("num_hidden_layers", "hidden_size")), *eagle3.BLAME),
    incoming=eagle3.incoming,
    losses=losses,
    asks=frozenset({"layer_ids", "norm_output"}),
    states_tokens=False,
)

GGUF_LAYERS = 3  # of the target, which llama.cpp's encoder expects
GGUF_NAMES = {
    EMBEDDING: "token_embd.weight",
    LM_HEAD: "output.weight",
    "norm.weight": "output_norm.weight",
    "input_norm.weight": "enc.output_norm.weight",
}
GGUF_LAYER = {
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


def read_gguf(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    """Layer ids are hidden_states, whatever the first of them is: llama.cpp takes the inputs of these layers."""
    return read(fields, shapes, replace(provided, layer_ids="hidden_states", norm_output="vllm"))


def spell_gguf(name: str, config: HeadShape) -> str:
    match = re.fullmatch(r"layers\.0\.(.+)\.(weight|bias)", name)
    return f"blk.0.{GGUF_LAYER[match[1]]}.{match[2]}" if match else GGUF_NAMES.get(name, name)


def write_gguf(checkpoint: Checkpoint) -> dict[str, Any]:
    config = cast(Eagle3Config, checkpoint.config)
    layer = config.layer
    for unsupported, message in (
        (layer.num_layers != 1, f"num_hidden_layers={layer.num_layers}: llama.cpp has room for one layer"),
        (
            len(config.aux_layers) != GGUF_LAYERS,
            f"aux_layers={list(config.aux_layers)}: llama.cpp feeds a head {GGUF_LAYERS} layers",
        ),
        (config.fc_norm, "fc_norm=true: llama.cpp has no norm per feature"),
        (config.norm_output, "norm_output=true: llama.cpp feeds the state back without a norm"),
        (layer.attention_bias or layer.mlp_bias, "attention_bias, mlp_bias: llama.cpp has no biases in a head"),
    ):
        if unsupported:
            raise ValueError(message)
    return write(checkpoint)


GGUF_FORMAT = Format(
    name="llama.cpp",
    heads=("eagle3",),
    matches=lambda config, files: False,  # a file, not a folder
    read=read_gguf,
    write=write_gguf,
    spell=spell_gguf,
    optional=eagle3.shared_with_target,
    implied=frozenset({"t2d"}),
    blame=((r"attn|ffn", ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")),),
    incoming=eagle3.incoming,
    states_tokens=False,
    gguf=True,
)
FORMATS, LAYOUT = (speculators.FORMAT, FORMAT, GGUF_FORMAT), speculators.FORMAT
