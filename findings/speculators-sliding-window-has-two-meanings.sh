#!/usr/bin/env bash
# Packages: speculators 0.9.0, transformers 5.19.0, torch 2.13.0 (CPU).
# Behaviour: one key, `sliding_window` of `transformer_layer_config`, counts in two ways. With a window of W, a row that is
# drafted d tokens after slot p sees of the sequence
#   eagle3, dflash   the last W slots up to p, for every d; the rows drafted since come on top;
#   peagle           the slots above p + d - W, so W - d of them, as a decoder of transformers over these positions.
# One would have guessed: the window of transformers' decoder layers, whose config and classes these are, for all three:
# W keys in all, the row's own included.
# Why it matters: every layer has such a window by default (2,048). An engine that serves the layers with an ordinary
# sliding window gives a drafted row of eagle3 and dflash fewer keys than it was trained with, without an error.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip() { "$folder/env/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install torch==2.13.0
printf '%s\n' "torch==2.13.0" "transformers==5.19.0" >"$folder/pins.txt"
pip install -c "$folder/pins.txt" speculators==0.9.0
pip uninstall -y torchvision torchaudio # of another torch, and imported where they are there

cat >"$folder/show.py" <<'PY'
import torch
from speculators.models.dflash.attention import create_anchor_block_mask_mod
from speculators.models.eagle3.attention import create_combined_mask_mod
from speculators.models.peagle.attention import create_peagle_mask_mod
from transformers.masking_utils import sliding_window_causal_mask_function

WINDOW, LENGTH, SLOT, DEPTHS = 4, 12, 9, 3
document, zero = torch.zeros(LENGTH, dtype=torch.long), torch.tensor(0)


def seen(mask, row, keys, names):
    return [name for key, name in zip(keys, names) if bool(mask(zero, zero, torch.tensor(row), torch.tensor(key)))]


slots = list(range(LENGTH))
eagle3 = create_combined_mask_mod(document, LENGTH, sliding_window=WINDOW)
anchor = torch.cat([torch.arange(LENGTH), torch.full((DEPTHS - 1,), SLOT)])
depth = torch.cat([torch.zeros(LENGTH, dtype=torch.long), torch.arange(1, DEPTHS)])
peagle = create_peagle_mask_mod(anchor, depth, document, sliding_window=WINDOW)
dflash, _, _ = create_anchor_block_mask_mod(document, LENGTH, torch.tensor([SLOT + 1]), DEPTHS, sliding_window=WINDOW)
plain = sliding_window_causal_mask_function(WINDOW)
rows = {"eagle3": [], "peagle": [], "dflash": [], "transformers": []}
for d in range(DEPTHS):
    rows["eagle3"].append(seen(eagle3, SLOT, slots, slots))  # the mask of a slot is that of every depth
    rows["peagle"].append(seen(peagle, SLOT if d == 0 else LENGTH + d - 1, slots, slots))
    rows["dflash"].append(seen(dflash, d, slots, slots))
    rows["transformers"].append([key for key in seen(plain, SLOT + d, range(SLOT + 1), slots)])
print(f"window {WINDOW}, slot {SLOT}: slots of the sequence that are seen by the rows 0, 1, 2 drafted from it")
for name, depths in rows.items():
    print(f"{name:13}", *depths)
assert rows["transformers"] == [[6, 7, 8, 9], [7, 8, 9], [8, 9]]
assert rows["eagle3"] == [[6, 7, 8, 9]] * 3
assert rows["peagle"] == rows["transformers"]
assert rows["dflash"] == [[6, 7, 8, 9]] * 3
PY
HF_HUB_OFFLINE=1 "$folder/env/bin/python" "$folder/show.py" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
