#!/bin/bash
# compressed-tensors 0.20.0 (torch 2.13.0, transformers 5.19.0)
#
# Behaviour: of two groups of a quantization_config whose patterns both name a layer, the one whose pattern comes first
# in the alphabet counts, wherever the groups stand in the file; punctuation decides too, so that "re:.*mlp.*" (4 bits)
# beats "re:^mlp.down_proj$" (8 bits), and "re:.*down_proj$" beats "re:.*mlp.*". An exact name beats every pattern, a
# pattern every class. Of a pattern that stands behind another that matches the library warns "Could not match", also
# where it is the one that counts.
# One would have guessed: the first group of the file that matches, or the last, as elsewhere in the library: of two
# groups with the same target the later one replaces the earlier.
# Why it matters: the bits of a layer, and with them the sizes of its tensors, depend on how a pattern is spelt. A reader
# that goes by the order of the file takes other sizes than the writer had.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.19.0 compressed-tensors==0.20.0
"$folder/env/bin/python" - <<'PYTHON'
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config


def bits(*groups):
    """Return the bits that `mlp.down_proj` gets from groups of a target and a number of bits."""
    weights = {"type": "int", "strategy": "channel", "symmetric": True}
    config = {
        f"group_{number}": {"targets": [target], "weights": {**weights, "num_bits": size}}
        for number, (target, size) in enumerate(groups)
    }
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"down_proj": torch.nn.Linear(64, 64)})})
    stated = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": config}
    apply_quantization_config(model, QuantizationConfig.model_validate(stated), show_progress=False)
    return model["mlp"]["down_proj"].quantization_scheme.weights.num_bits


MLP, DOWN, ANCHORED, NAME = ("re:.*mlp.*", 4), ("re:.*down_proj$", 8), ("re:^mlp.down_proj$", 8), ("mlp.down_proj", 8)
seen = {
    "mlp, down_proj": bits(MLP, DOWN),
    "down_proj, mlp": bits(DOWN, MLP),
    "mlp, ^mlp.down_proj": bits(MLP, ANCHORED),
    "^mlp.down_proj, mlp": bits(ANCHORED, MLP),
    "the name in 4 bits, then in 8": bits(("mlp.down_proj", 4), NAME),
}
for groups, number in seen.items():
    print(f"{groups}: {number} bits")
assert list(seen.values()) == [8, 8, 4, 4, 8], "the behaviour has changed"
PYTHON
