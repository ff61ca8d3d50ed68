"""Checkpoint formats by name: reading a folder (or GGUF file) of any of them strictly, and writing one.

`read_checkpoint` turns any of them into a Checkpoint, `write_checkpoint` turns that into any that can hold its head.
Nothing is dropped: a tensor or key that has no place is an error that names it. Independent of engine and training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.config import read_config_json, read_json
from models.fields import Fields
from models.formats import headway
from models.formats.checkpoint import Checkpoint, ConversionOptions, Format, Verifier, formats_of
from models.formats.files import read_weights
from models.formats.matching import bare_names, expected_tensors, match
from models.gguf import is_gguf
from models.heads import HEADS
from models.heads.config import EMBEDDING, LM_HEAD, PROVENANCE, HeadShape

# In the order in which a folder is tried: our export also matches the layout that it follows.
FORMATS: dict[str, Format] = {
    form.name: form for form in (headway.FORMAT, *(form for head in HEADS.values() for form in formats_of(head)))
}
CONFIG = "config.json"
# of heads that others train and no module of ours computes: speculators_model_type or architecture
UNSUPPORTED = {
    "xpress": "speculators' XPress, DFlash with a refiner of whole blocks",
    "DominoDraftModel": "SpecForge's Domino, DFlash with a GRU over the drafted tokens",
}


@dataclass(frozen=True)
class RenderedCheckpoint:
    """config.json and the tensors under our names; of those that are written, name and dtype in the file.

    `notes`: what the file cannot express. In `dtypes` of a GGUF file are ggml's types.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    names: dict[str, str]
    dtypes: dict[str, str]
    notes: list[str]


def read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder}: no {CONFIG}" + ("" if folder.is_dir() else "; there is no such folder"))
    return read_config_json(folder / CONFIG)


def detect(folder: Path) -> Format:
    """Return the format of a GGUF file, or of a folder by its config.json. Raises ValueError when it is unknown."""
    if is_gguf(folder):
        return next(form for form in FORMATS.values() if form.gguf)
    config, files = read_config(folder), {path.name for path in folder.iterdir()}
    for form in FORMATS.values():
        if form.matches(config, files):
            return form
    architectures = Fields(config).take("architectures", list, [])
    stated = str(config.get("speculators_model_type") or next(iter(architectures), ""))
    unknown = f"is of no format that we know: {', '.join(FORMATS)}"
    states = f"; it states {stated!r}" if stated and stated not in UNSUPPORTED else ""
    raise ValueError(f"{folder}: {UNSUPPORTED.get(stated, CONFIG)} {unknown}{states}")


def head_kind(path: Path) -> str:
    """Return the kind of the head in a folder or GGUF file, of which only config.json is read. Raises ValueError."""
    form = detect(path)
    return form.kind(read_config(path)) if form.kind else form.heads[0]


def read_checkpoint(form: Format, folder: Path, provided: ConversionOptions | None = None) -> Checkpoint:
    """Read a folder, or GGUF file, of format `form`.

    Raises ValueError naming whatever is missing, unknown, doubled, contradictory or does not fit `provided.verifier`.
    """
    if form.gguf:
        from models.gguf.head import read_head

        config, tensors = read_head(folder)
    else:
        config = read_config(folder)
        tensors = form.open(folder) if form.open else read_weights(folder, form.weights)
    try:
        checkpoint = interpret(form, config, tensors, provided or ConversionOptions())
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return replace(checkpoint, provenance=read_json(folder / PROVENANCE)) if form is headway.FORMAT else checkpoint


def interpret(
    form: Format, config: Mapping[str, Any], tensors: Mapping[str, Tensor], provided: ConversionOptions
) -> Checkpoint:
    """Make a Checkpoint of the content of the files; `read_checkpoint` reads them."""
    for option in ("layer_ids", "norm_output"):
        value = getattr(provided, option)
        if value is not None and option not in form.asks:
            raise ValueError(f"--{option.replace('_', '-')} {value}: {form.name} does not leave that open")
    bare, names = bare_names(tensors, form.prefixes, form.aliases)
    fields = Fields(config)
    stated = form.read(fields, {name: tuple(tensor.shape) for name, tensor in bare.items()}, provided)
    if form is not headway.FORMAT:  # which compares all keys itself
        stated.notes.extend(fields.done())
    remarks = dict[str, str]()
    for name in [name for name in bare if name.endswith("rotary_emb.inv_freq")] if form is not headway.FORMAT else ():
        remarks[name] = "follows from config.json"  # a buffer that old exporters saved
        del bare[name]
    remarks |= form.incoming(bare, stated.config)
    matched, spelled = match(form, stated, bare, config)
    _check_verifier(stated.config, provided.verifier, final_state=form.final_state)
    tokens = provided.speculative_tokens or stated.speculative_tokens
    if tokens and stated.config.max_depth and tokens > stated.config.max_depth:
        raise ValueError(f"speculative_tokens={tokens}: this head drafts at most {stated.config.max_depth}")
    return Checkpoint(
        head=stated.config.name,
        config=stated.config,
        tensors=matched,
        sources={our_name: names.get(source, source) for our_name, source in spelled.items()},
        remarks={names.get(source, source): remark for source, remark in remarks.items()},
        verifier=provided.verifier or stated.verifier,
        speculative_tokens=tokens,
        notes=stated.notes,
    )


def write_checkpoint(form: Format, checkpoint: Checkpoint, path: Path, **options: Any) -> RenderedCheckpoint:
    """Call `render`, with its `options`, then `save`."""
    written = render(form, checkpoint, **options)
    save(form, checkpoint, written, path)
    return written


def save(form: Format, checkpoint: Checkpoint, written: RenderedCheckpoint, path: Path) -> None:
    """Write config.json and weights into an existing folder, or a GGUF file; read them back and compare."""
    # cloned, because tensors of a pickle may share memory, which safetensors cannot
    tensors = {name: written.tensors[our_name].contiguous().clone() for our_name, name in written.names.items()}
    if form.gguf:
        _save_gguf(form, written, tensors, path)
        return
    (path / CONFIG).write_text(json.dumps(written.config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, path / form.weights[0], metadata={"format": "pt"})
    if form is headway.FORMAT:
        text = json.dumps(checkpoint.provenance or {}, indent=2) + "\n"
        (path / PROVENANCE).write_text(text, encoding="utf-8")
    layer_ids = "hidden_states" if "layer_ids" in form.asks else None
    norm_output = "vllm" if "norm_output" in form.asks else None
    reread = read_checkpoint(form, path, ConversionOptions(layer_ids=layer_ids, norm_output=norm_output))
    unstated = {name: getattr(checkpoint.config, name) for name in form.unstated}
    assert replace(cast(Any, reread.config), **unstated) == checkpoint.config, (reread.config, checkpoint.config)
    _assert_equal(form.outgoing(reread.tensors, checkpoint.config), written.tensors)


def _save_gguf(form: Format, written: RenderedCheckpoint, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Config and tensors are compared as a GGUF file states them: numbers in fp32, and weights rounded."""
    from models.gguf.head import as_stored, head_keys, write_head

    kinds = {name: written.dtypes[our_name] for our_name, name in written.names.items()}
    write_head(path, written.config, tensors, kinds)
    reread = read_checkpoint(form, path)
    assert head_keys(form.write(reread)) == head_keys(written.config), (reread.config, written.config)
    rounded = {name: as_stored(written.tensors[name], kind) for name, kind in written.dtypes.items()}
    _assert_equal(reread.tensors, written.tensors | rounded)


def _assert_equal(reread: Mapping[str, Tensor], written: Mapping[str, Tensor]) -> None:
    assert reread.keys() == written.keys(), reread.keys() ^ written.keys()
    assert all(torch.equal(value, written[name]) for name, value in reread.items())


def render(
    form: Format,
    checkpoint: Checkpoint,
    *,
    of_target: Mapping[str, Callable[[], Tensor]] | None = None,
    dtype: str | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> RenderedCheckpoint:
    """Return what a file of this format will hold; the inverse of `interpret`.

    `of_target`: functions, by our names, that read the target's embedding and LM head, `[V, H]` each; called only for a
    tensor that the checkpoint shares with the target and the format must store. For a GGUF file: `dtype` of its
    matrices (f16, q8_0, ...; None: theirs), and the keys of the target's tokenizer. Raises ValueError when the format
    cannot hold this head.
    """
    if checkpoint.head not in form.heads:
        suitable = [name for name, other in FORMATS.items() if checkpoint.head in other.heads]
        raise ValueError(
            f"{form.name} holds {', '.join(form.heads)}; this head is {checkpoint.head}: one of {', '.join(suitable)}"
        )
    config, tensors = form.write(checkpoint), dict(checkpoint.tensors)
    missing = set(expected_tensors(checkpoint.config)) - set(tensors) - form.optional(checkpoint.config)
    assert missing <= {EMBEDDING, LM_HEAD}, missing
    for name in sorted(missing):
        if of_target is None:
            raise ValueError(
                f"{name}: not in the checkpoint, which shares the target's, and {form.name} needs it; give --verifier "
                "(a folder with its weights)"
            )
        tensors[name] = of_target[name]()
    tensors = form.outgoing(tensors, checkpoint.config)
    names = {
        our_name: form.written_prefix + form.spell(our_name, checkpoint.config)
        for our_name in tensors
        if our_name not in form.implied
    }
    notes = form.losses(checkpoint)
    if not form.states_tokens:
        notes.append(f"{form.name} does not say how many tokens to draft")
    if checkpoint.provenance is not None and form is not headway.FORMAT:
        notes.append(f"{PROVENANCE} stays behind: what the head was trained for, and how")
    if not form.gguf:
        dtypes = {our_name: str(tensors[our_name].dtype).removeprefix("torch.") for our_name in names}
        return RenderedCheckpoint(config | {"torch_dtype": _dtype(tensors)}, tensors, names, dtypes, notes)
    from models.gguf.head import kind_of

    if not tokenizer:
        notes.append("no tokenizer is in it, since --verifier is no GGUF file; llama.cpp drafts by token ids")
    dtypes = {our_name: kind_of(name, tensors[our_name], dtype) for our_name, name in names.items()}
    return RenderedCheckpoint(config | dict(tokenizer or {}), tensors, names, dtypes, notes)


def _check_verifier(config: HeadShape, verifier: Verifier | None, *, final_state: bool) -> None:
    """Raise ValueError naming the size in which head and verifier differ."""
    if verifier is None:
        return
    for key, head_size, target_size in (
        ("vocab_size", config.vocab_size, verifier.vocab_size),
        ("target_hidden_size", config.target_hidden_size, verifier.hidden_size),
    ):
        if target_size is not None and head_size != target_size:
            raise ValueError(f"the head's {key} is {head_size}, the target's is {target_size}; it is another target's")
    if verifier.num_layers is not None and max(config.aux_layers) >= verifier.num_layers + final_state:
        raise ValueError(f"the head reads layer {max(config.aux_layers)}, the target has {verifier.num_layers}")


def _dtype(tensors: dict[str, Tensor]) -> str:
    """Return the widest dtype, so that a reader that casts to it loses nothing."""
    dtype: torch.dtype | None = None
    for tensor in tensors.values():
        if tensor.is_floating_point():
            dtype = tensor.dtype if dtype is None else torch.promote_types(dtype, tensor.dtype)
    return str(dtype).removeprefix("torch.")
