"""Converts a target for every program: to the GGUF file that llama.cpp reads, or the folder that the others read.

llama.cpp reads a GGUF file directly; for the others it is dequantised into a folder. llama.cpp's converter turns a
folder into a GGUF file; an EAGLE-3 head is written as scripts/convert.py does. Files are cached under `peers`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from models.checkpoint import fingerprint
from models.formats.conversion import FORMATS, detect, read_checkpoint, write_checkpoint
from models.gguf import is_gguf
from train.storage import atomic

OUT_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# The converter only knows the pre-tokenizers of published models. Requests by token ids use none, so any name will do.
CONVERT = """
import sys
tree, packages, *sys.argv = sys.argv[1:]
sys.path[:0] = [tree, tree + "/gguf-py"]
sys.path.append(packages)
from conversion.base import TextModel
import convert_hf_to_gguf
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
convert_hf_to_gguf.main()
"""


def gguf_of_target(peers: Path, target: Path, dtype: str) -> Path:
    """Return the target, a folder or GGUF file, as a GGUF file; `dtype` is torch's name.

    Raises ValueError with the end of the converter's error output.
    """
    return target if is_gguf(target) else _cached(peers, target, dtype, partial(_run_converter, peers, target, dtype))


def gguf_of_head(peers: Path, head: Path, target: Path, dtype: str) -> Path:
    """Return `head`, the folder of an EAGLE-3 head, as a GGUF file. Raises ValueError if llama.cpp has no such head."""

    def write(out: Path) -> None:
        checkpoint, tokenizer = read_checkpoint(detect(head), head), None
        if is_gguf(target):
            from models.gguf.head import tokenizer_keys

            tokenizer = tokenizer_keys(target)
        write_checkpoint(FORMATS["llama.cpp"], checkpoint, out, dtype=OUT_TYPES[dtype], tokenizer=tokenizer)

    return _cached(peers, head, dtype, write)


def folder_of_target(peers: Path, target: Path, dtype: str) -> Path:
    """Return the target as a folder in Hugging Face's layout; a GGUF file is dequantised to `dtype`.

    Raises ValueError for a broken file.
    """
    from models.targets import load_target
    from models.targets.writing import save_target

    if not is_gguf(target):
        return target
    folder = peers / "folders" / f"{fingerprint(target)}-{dtype}"
    if not folder.is_dir():
        with atomic.replace_folder(folder) as staging:
            save_target(load_target(str(target), dtype=getattr(torch, dtype)), staging)
    return folder


def _cached(peers: Path, folder: Path, dtype: str, write: Callable[[Path], None]) -> Path:
    out = peers / "gguf" / f"{fingerprint(folder)}-{OUT_TYPES[dtype]}.gguf"
    if not out.is_file():
        out.parent.mkdir(exist_ok=True)
        with atomic.replace_file(out) as staging:
            write(staging)
    return out


def _run_converter(peers: Path, folder: Path, dtype: str, out: Path) -> None:
    tree, kind = peers / "llama.cpp/source/vendor/llama.cpp", OUT_TYPES[dtype]
    arguments = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(out), "--outtype", kind]
    command = [sys.executable, "-c", CONVERT, str(tree), str(peers / "llama.cpp/python"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"{folder}: llama.cpp's converter failed: " + "\n".join(result.stderr.splitlines()[-8:]))
