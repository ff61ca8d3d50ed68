#!/bin/bash
# transformers 5.19.0
#
# Behaviour: the config of AWQ inherits that of GPTQ, with its defaults. An AWQ checkpoint with zero points (zero_point
# true, the default) that is saved again says "sym": true beside it, and desc_act, true_sequential, damp_percent and
# act_group_aware, none of which AWQ has. Reading a file that says nothing of the kind gives the same.
# One would have guessed: an AWQ config states what AWQ's file stated; sym is the opposite of zero_point.
# Why it matters: other writers of AWQ (AutoRound, GPTQModel) set zero_point = not sym, so a reader has cause to trust
# either. One that trusts sym drops the zero points, and the model is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet transformers==5.19.0
"$folder/env/bin/python" - <<'PYTHON'
from transformers import AwqConfig

published = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
written = AwqConfig.from_dict(published).to_dict()
print("read:   ", published)
print("written:", {key: value for key, value in written.items() if value is not None})
assert written["zero_point"] is True, "the behaviour has changed"
assert written["sym"] is True, "the behaviour has changed"
assert written["damp_percent"] == 0.1, "the behaviour has changed"
PYTHON
