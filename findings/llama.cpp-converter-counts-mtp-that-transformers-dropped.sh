#!/bin/bash
# transformers 5.24.0, the converter of llama.cpp in llama-cpp-python 0.3.36
#
# Behaviour: transformers reads a Qwen3.5 without its multi-token prediction module and saves it without, but its
# config.json keeps mtp_num_hidden_layers. llama.cpp's converter counts that module's layer, finds no tensor for it, and
# ends with "exported successfully": the file says five layers and has tensors of four. llama.cpp's library says of it
# "tensor 'blk.4.attn_norm.weight' not found" (not run here, where it would have to be compiled). With --no-mtp the same
# folder makes a file of four layers, which it loads.
# One would have guessed: the converter notices that tensors are missing, or counts the modules that are there.
# Why it matters: every Qwen3.5 that was fine-tuned with transformers is such a folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.13.0 transformers==5.24.0 sentencepiece==0.2.1 protobuf==7.36.2
env/bin/pip download --quiet --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
mkdir source && tar -xzf llama_cpp_python-*.tar.gz -C source --strip-components=1
env/bin/python - <<'PYTHON'
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
config = Qwen3_5TextConfig(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
    linear_value_head_dim=16, mtp_num_hidden_layers=1,
)
Qwen3_5ForCausalLM(config).to(torch.bfloat16).save_pretrained("model")
PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained("model")
assert json.loads(Path("model/config.json").read_text())["mtp_num_hidden_layers"] == 1, "the behaviour has changed"
PYTHON
# The converter knows pre-tokenizers by a hash of what they do; this one is GPT-2's.
cat >convert.py <<'PYTHON'
import runpy
import sys

sys.path[:0] = ["source/vendor/llama.cpp/gguf-py", "source/vendor/llama.cpp"]
import conversion.base

conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
runpy.run_path("source/vendor/llama.cpp/convert_hf_to_gguf.py", run_name="__main__")
PYTHON
env/bin/python convert.py model --outfile plain.gguf 2>&1 | grep "successfully exported"
env/bin/python convert.py model --outfile without.gguf --no-mtp 2>&1 | grep "successfully exported"
env/bin/python - <<'PYTHON'
import sys

sys.path.insert(0, "source/vendor/llama.cpp/gguf-py")
from gguf import GGUFReader

for file, stated in (("plain.gguf", 5), ("without.gguf", 4)):
    reader = GGUFReader(file)
    layers = int(reader.get_field("qwen35.block_count").contents())
    stored = sorted({tensor.name.split(".")[1] for tensor in reader.tensors if tensor.name.startswith("blk.")})
    print(f"{file}: says {layers} layers, has tensors of {', '.join(stored)}")
    assert (layers, len(stored)) == (stated, 4), "the behaviour has changed"
PYTHON
