"""A target and an EAGLE-3 head as GGUF files, which llama.cpp reads, made by its own converter and kept beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from models.weights import fingerprint

OUT_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# The converter knows pre-tokenizers by a list of published models; who asks by token ids needs none, so one is named.
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
    """`target` is a folder, `dtype` a name of torch's. Raises ValueError with the converter's last words."""
    return _convert(peers, target, dtype, [])


def gguf_of_head(peers: Path, head: Path, target: Path, dtype: str) -> Path:
    """`head` in speculators' layout. Raises as above."""
    return _convert(peers, head, dtype, ["--target-model-dir", str(target)])


def _convert(peers: Path, folder: Path, dtype: str, options: list[str]) -> Path:
    out = peers / "gguf" / f"{fingerprint(folder)}-{OUT_TYPES[dtype]}.gguf"
    if out.is_file():
        return out
    tree, partial = peers / "llama.cpp/source/vendor/llama.cpp", out.with_suffix(".partial")
    out.parent.mkdir(exist_ok=True)
    words = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(partial), "--outtype", OUT_TYPES[dtype], *options]
    command = [sys.executable, "-c", CONVERT, str(tree), str(peers / "llama.cpp/python"), *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ValueError(f"{folder}: llama.cpp's converter failed: " + "\n".join(ran.stderr.splitlines()[-8:]))
    partial.replace(out)
    return out
