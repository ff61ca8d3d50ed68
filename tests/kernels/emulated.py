"""Runs C kernels that were compiled for another processor in its emulator, in place of this one's.

Arguments are packed here and computed there, so a layer can be tested as usual.
"""

from __future__ import annotations

import ctypes
import gc
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kernels.cpu.declarations import SOURCES

DRIVER = Path(__file__).with_name("call_kernel.c")
AARCH64 = ("aarch64-linux-gnu-gcc", "qemu-aarch64")
NAME = 32  # bytes of a function's name in the file
TIMEOUT_S = 1800


def missing(programs: Sequence[str] = AARCH64) -> list[str]:
    return [program for program in programs if shutil.which(program) is None]


def build(folder: Path, compiler: str = AARCH64[0], flags: Sequence[str] = ()) -> Path:
    """Compile driver and kernels, statically, since the emulator has none of the other processor's libraries."""
    program = folder / "call_kernel"
    sources = [str(file) for file in SOURCES if file.suffix == ".c"]
    command = [compiler, "-O1", "-std=gnu11", "-static", *flags, str(DRIVER), *sources, "-o", str(program), "-lm"]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    return program


def emulate(
    function: str, structure: type[ctypes.Structure], program: Path, emulator: Sequence[str]
) -> Callable[[int], None]:
    """Return a stand-in for `function` of the library, which takes the address of its structure."""

    def call(address: int) -> None:
        arguments = structure.from_address(address)
        arguments.threads = 1
        pointers = [(name, value) for name, value in pointer_fields(arguments) if value]
        assert getattr(arguments, "next", None) is None, "a structure that points to another is not supported"
        extents = storages()
        contents = [(name, value, extents(value)) for name, value in pointers]
        with tempfile.TemporaryDirectory() as folder:
            given, taken = Path(folder) / "in", Path(folder) / "out"
            with given.open("wb") as file:
                file.write(function.encode().ljust(NAME, b"\0"))
                file.write(number(ctypes.sizeof(structure)) + number(len(contents)) + bytes(arguments))
                for name, value, size in contents:
                    file.write(number(getattr(structure, name).offset) + number(size) + ctypes.string_at(value, size))
            subprocess.run([*emulator, str(program), str(given), str(taken)], check=True, timeout=TIMEOUT_S)
            result = taken.read_bytes()
        for _, value, size in contents:
            ctypes.memmove(value, result[:size], size)
            result = result[size:]

    return call


def number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def pointer_fields(arguments: ctypes.Structure) -> list[tuple[str, Any]]:
    kinds = [(field[0], field[1]) for field in arguments._fields_]
    return [(name, getattr(arguments, name)) for name, kind in kinds if kind is ctypes.c_void_p]


def storages() -> Callable[[int], int]:
    """Return a function that gives the bytes from an address to the end of the tensor that holds it."""
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.device.type == "cpu"]
    spans = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}

    def extent(address: int) -> int:
        return next(begin + size - address for begin, size in spans.items() if begin <= address < begin + size)

    return extent
