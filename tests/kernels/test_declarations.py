"""The structures that ctypes passes to C have the layout that the compiler gives them."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch

from kernels import (
    attention,
    decoder,
    draft,
    linear,
    range_attention,
    recurrence,
    recurrent_parts,
    row_gradients,
    vocabulary,
    walk,
)
from kernels.cpu import segments
from kernels.cpu.declarations import SCALARS, SOURCES, fields, functions
from kernels.cpu.library import compiler, flags, library
from kernels.dispatch import KINDS, LANES
from kernels.weights import ggml
from kernels.weights.ggml import FORMATS

STRUCTURES = {
    "attention_args": (attention.AttentionArguments, "attention.h"),
    "linear_args": (linear.LinearArguments, "linear.h"),
    "pack_args": (segments.PackArguments, "pack.c"),
    "convolution": (decoder.Convolved, "decoder.h"),
    "blocks_args": (ggml.GgmlArguments, "blocks.c"),
    "decoder_layer": (decoder.Layer, "decoder.h"),
    "decoder_args": (decoder.DecoderArguments, "decoder.h"),
    "draft_args": (draft.DraftArguments, "draft.c"),
    "branch_args": (draft.Branch, "draft.c"),
    "range_args": (range_attention.RangeArguments, "range_attention.c"),
    "row_args": (row_gradients.RowArguments, "row_gradients.c"),
    "delta_net": (recurrent_parts.DeltaNet, "recurrence.h"),
    "convolve_args": (recurrence.ConvolveArguments, "recurrence.c"),
    "scan_args": (recurrence.ScanArguments, "recurrence.c"),
    "walk_args": (walk.WalkArguments, "walk.c"),
    "vocabulary_loss_args": (vocabulary.LossArguments, "vocabulary.c"),
    "vocabulary_teach_args": (vocabulary.TeachArguments, "vocabulary.c"),
}
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler on this machine")


def compiles(source: str) -> bool:
    cc = compiler()
    assert cc is not None
    command = [cc, *flags(), "-fsyntax-only", f"-I{SOURCES[0].parent}", "-xc", "-"]
    return subprocess.run(command, input=source.encode(), capture_output=True).returncode == 0


def layout(name: str, structure: type[ctypes.Structure]) -> list[str]:
    """Return C expressions that hold if the compiler lays the structure out as ctypes does."""
    members = {field: getattr(structure, field) for field, *_ in structure._fields_}
    return [
        f"sizeof({name}) == {ctypes.sizeof(structure)}",
        *(f"offsetof({name}, {field}) == {member.offset}" for field, member in members.items()),
        *(f"sizeof((({name} *)0)->{field}) == {member.size}" for field, member in members.items()),
    ]


def asserting(expressions: list[str], *files: str) -> str:
    return "\n".join(
        [*(f'#include "{file}"' for file in files), *(f'_Static_assert({text}, "");' for text in expressions)]
    )


@needs_compiler
@pytest.mark.parametrize("name", STRUCTURES)
def test_the_compiler_lays_out_what_ctypes_lays_out(name):
    structure, file = STRUCTURES[name]
    expressions = layout(name, structure)
    assert compiles(asserting(expressions, file))
    last, *_ = structure._fields_[-1]
    wrong = f"offsetof({name}, {last}) == {getattr(structure, last).offset + 8}"
    assert not compiles(asserting([*expressions, wrong], file)), "the check itself notices a difference"


@needs_compiler
def test_constants_are_those_of_c():
    sizes = {name: getattr(segments, name) for name in ("PANEL", "WIDE_PANEL")}
    sizes |= {name: getattr(linear, name) for name in ("PACKED_ROWS", "FILLED_ROWS")}
    kinds = {"FLOAT32": KINDS[torch.float32], "BFLOAT16": KINDS[torch.bfloat16]}
    formats = {name.upper(): value for name, value in segments.FORMATS.items()}
    formats |= {"WIDE": segments.WIDE[torch.float32], "WIDE_BF16": segments.WIDE[torch.bfloat16]}
    scales = {name.upper(): value for name, value in segments.SCALES.items()}
    kept = {name: index for index, name in enumerate(FORMATS)}
    sizes |= {"MOST_TAPS": recurrence.MOST_TAPS, "FOLD": LANES}
    expressions = [f"{name} == {value}" for name, value in (sizes | kinds | formats | scales | kept).items()]
    assert compiles(asserting([*expressions, f"{LANES} % LANES == 0"], "blocks.c", "recurrence.c"))


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_field_that_c_does_not_have_is_an_error(name):
    structure, _ = STRUCTURES[name]
    with pytest.raises(AttributeError):
        structure(no_such_field=1)


def test_a_type_that_is_not_understood_is_an_error(monkeypatch):
    monkeypatch.delitem(SCALARS, "float")
    with pytest.raises(KeyError, match="float"):
        fields("attention_args")


@needs_compiler
def test_functions_return_what_their_prototypes_say():
    native = library()
    assert native is not None
    declared = functions()
    assert declared["attention_scratch"] == (ctypes.c_int64, [ctypes.c_int64])
    assert declared["rms_norm"][1].count(ctypes.c_float) == 1
    for name, (result, arguments) in declared.items():
        assert (getattr(native, name).restype, list(getattr(native, name).argtypes)) == (result, arguments)
