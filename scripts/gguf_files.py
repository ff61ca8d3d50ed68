"""Converts a target for every program: to the GGUF file that llama.cpp reads, or the folder that the others read.

llama.cpp reads a GGUF file directly; for the others it is dequantised into a folder. llama.cpp's converter turns a
folder or an EAGLE-3 head into a GGUF file. Converted files are cached under `peers`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from models.checkpoint import fingerprint
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
    return target if is_gguf(target) else _convert(peers, target, dtype, [])


def gguf_of_head(peers: Path, head: Path, target: Path, dtype: str) -> Path:
    """Return `head`, a folder in speculators' layout, as a GGUF file. Raises ValueError as `gguf_of_target` does."""
    return _convert(peers, head, dtype, ["--target-model-dir", str(folder_of_target(peers, target, dtype))])


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


def _convert(peers: Path, folder: Path, dtype: str, options: list[str]) -> Path:
    out = peers / "gguf" / f"{fingerprint(folder)}-{OUT_TYPES[dtype]}.gguf"
    if out.is_file():
        return out
    tree, partial = peers / "llama.cpp/source/vendor/llama.cpp", out.with_suffix(".partial")
    out.parent.mkdir(exist_ok=True)
    arguments = [
        "convert_hf_to_gguf.py",
        str(folder),
        "--outfile",
        str(partial),
        "--outtype",
        OUT_TYPES[dtype],
        *options,
    ]
    command = [sys.executable, "-c", CONVERT, str(tree), str(peers / "llama.cpp/python"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"{folder}: llama.cpp's converter failed: " + "\n".join(result.stderr.splitlines()[-8:]))
    partial.replace(out)
    return out
