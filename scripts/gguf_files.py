"""Converts a target for every program: to the GGUF file that llama.cpp reads, or the folder that the others read.

llama.cpp reads a GGUF file directly; for the others it is dequantised into a folder. llama.cpp's converter turns a
folder into a GGUF file, and its quantiser writes a folder's weights in blocks; an EAGLE-3 head is written as
scripts/convert.py does. What a measurement needs is cached under `peers`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from kernels.blocks import FORMATS
from models.checkpoint import fingerprint
from models.formats.conversion import FORMATS as HEAD_FORMATS
from models.formats.conversion import detect, read_checkpoint, write_checkpoint
from models.gguf import is_gguf
from scripts.peer_folders import llama_cpp
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
    return target if is_gguf(target) else _cached(peers, target, OUT_TYPES[dtype], partial(_convert, peers, target))


def gguf_of_head(peers: Path, head: Path, target: Path, out_type: str) -> Path:
    """Return `head`, the folder of an EAGLE-3 head, as a GGUF file with weights of `out_type` (f32, bf16, q8_0).

    Raises ValueError if llama.cpp has no such head.
    """

    def write(out: Path, out_type: str) -> None:
        checkpoint, tokenizer = read_checkpoint(detect(head), head), None
        if is_gguf(target):
            from models.gguf.head import tokenizer_keys

            tokenizer = tokenizer_keys(target)
        write_checkpoint(HEAD_FORMATS["llama.cpp"], checkpoint, out, dtype=out_type, tokenizer=tokenizer)

    return _cached(peers, head, out_type, write)


def write_quantised(peers: Path, target: Path, formats: Sequence[str], out: Path) -> list[Path]:
    """Write a target's folder as one GGUF file for each of `formats`, with all matrices in it; return the files.

    They are `out`/<name of the folder>-<format>.gguf. Raises ValueError for an unknown format, for what is there
    already, and if the converter or the quantiser fails.
    """
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ValueError(f"{unknown[0]}: no format of weights in blocks; there are {', '.join(FORMATS)}")
    quantise = llama_cpp(peers, "llama-quantize")
    files = [out / f"{target.name}-{name}.gguf" for name in formats]
    if present := [file for file in files if file.exists()]:
        raise ValueError(f"{present[0]}: is there already; remove it, or give another folder")
    atomic.make_folder(out)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        wide = Path(folder) / "wide.gguf"
        _convert(peers, target, wide, "bf16")
        for name, file in zip(formats, files, strict=True):
            # The mixture of a K-quant with the letter S differs least from its format; --pure leaves nothing of it.
            staging, kind = Path(folder) / file.name, f"{name}_S" if name in ("Q4_K", "Q5_K") else name
            _run([str(quantise), "--pure", str(wide), str(staging), kind], f"{target}: llama-quantize")
            staging.replace(file)
    return files


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


def _cached(peers: Path, folder: Path, out_type: str, write: Callable[[Path, str], None]) -> Path:
    out = peers / "gguf" / f"{fingerprint(folder)}-{out_type}.gguf"
    if not out.is_file():
        out.parent.mkdir(exist_ok=True)
        with atomic.replace_file(out) as staging:
            write(staging, out_type)
    return out


def _convert(peers: Path, folder: Path, out: Path, out_type: str) -> None:
    tree = peers / "llama.cpp/source/vendor/llama.cpp"
    command = [sys.executable, "-c", CONVERT, str(tree), str(peers / "llama.cpp/python"), "convert_hf_to_gguf.py"]
    command += [str(folder), "--outfile", str(out), "--outtype", out_type]
    _run(command, f"{folder}: llama.cpp's converter")


def _run(command: Sequence[str], what: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"{what} failed: " + "\n".join(result.stderr.splitlines()[-8:]))
