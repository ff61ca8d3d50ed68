"""Reads argument structures and prototypes from the C sources, so that ctypes lays them out as the compiler does.

Only what these sources use is understood: pointers (whatever they point to) and the scalars of `SCALARS`. Another type
is a KeyError; tests/kernels/test_declarations.py lets the compiler check sizes and offsets.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
SCALARS: dict[str, Any] = {"int64_t": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float}
STRUCTURE = re.compile(r"^typedef struct \{([^}]*)\} (\w+);", re.MULTILINE)
FUNCTION = re.compile(r"^(void|int|int64_t) (\w+)\(([^)]*)\) \{", re.MULTILINE)  # not static, hence exported


@cache
def _text() -> str:
    return re.sub(r"/\*.*?\*/", "", "\n".join(file.read_text() for file in SOURCES), flags=re.DOTALL)


def structure(name: str) -> type[ctypes.Structure]:
    """Return a structure of the C sources. Setting a field that it does not have is an AttributeError."""
    return type(name, (ctypes.Structure,), {"__slots__": (), "_fields_": fields(name)})


def copied(source: ctypes.Structure, values: Mapping[str, Any]) -> Any:
    """Return a copy of a structure, with these values of its fields."""
    copy = type(source).from_buffer_copy(source)
    for name, value in values.items():
        setattr(copy, name, value)
    return copy


def fields(structure: str) -> list[tuple[str, Any]]:
    """Return `ctypes.Structure._fields_` of a structure of the C sources."""
    (body,) = (body for body, name in STRUCTURE.findall(_text()) if name == structure)
    declarations = [declaration.split(",") for declaration in body.split(";") if declaration.strip()]
    return [
        (declarator.split()[-1].lstrip("*"), _type(first.split()[0], declarator))
        for first, *others in declarations
        for declarator in (first, *others)
    ]


def functions() -> dict[str, tuple[Any, list[Any]]]:
    """Return `restype` and `argtypes` of each exported function."""
    return {
        name: (SCALARS.get(result), [_type(part.split()[0], part) for part in parameters.split(",") if part != "void"])
        for result, name, parameters in FUNCTION.findall(_text())
    }


def _type(base: str, declarator: str) -> Any:
    return ctypes.c_void_p if "*" in declarator else SCALARS[base]
