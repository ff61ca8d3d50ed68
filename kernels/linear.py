"""Linear layers for serving. Contract: the bits of a row do not depend on how many rows share the call.

On a CPU the weight is prepacked for oneDNN, whose rows agree for every count >= 2 (shared fact, probed at start-up by
`assert_row_invariant`), so a single row is padded to two. Elsewhere rows go through in blocks of one fixed size, so
that every call of the library has the same shape.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_BLOCK = 64


class PackedLinear:
    """`y = x Wᵀ + b` for x `[..., K]`, W `[N, K]`; row-invariant in the sense above if `exact`. fp32, bf16 and fp16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, exact: bool = True) -> None:
        self.out_features, self.in_features = weight.shape
        self._onednn = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
        if self._onednn:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        else:
            self._weight = weight
        self._bias, self._exact = bias, exact
        self.bytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        out = self._rows_onednn(rows) if self._onednn else self._rows_blocked(rows)
        return out.view(*x.shape[:-1], self.out_features)

    def _rows_onednn(self, rows: Tensor) -> Tensor:
        count = rows.shape[0]
        if count == 1:
            rows = rows.expand(2, -1)
        out = torch.ops.mkldnn._linear_pointwise(rows.contiguous(), self._weight, self._bias, "none", [], "")
        return out[:1] if count == 1 else out

    def _rows_blocked(self, rows: Tensor) -> Tensor:
        if not self._exact:
            return F.linear(rows, self._weight, self._bias)
        count = rows.shape[0]
        padded = F.pad(rows, (0, 0, 0, -count % ROW_BLOCK))
        return torch.cat([F.linear(block, self._weight, self._bias) for block in padded.split(ROW_BLOCK)])[:count]


def assert_row_invariant(linear: PackedLinear, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Probes the contract on this machine: 1, 2, 3, 5, 8, 17 and 32 rows against 64, which it answers.

    Raises ValueError if it fails.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, linear.in_features, generator=generator).to(device, dtype)
    whole = linear(x)
    for count in (1, 2, 3, 5, 8, 17, 32):
        if not torch.equal(linear(x[:count]), whole[:count]):
            raise ValueError(
                f"engine.exact=true: on this machine a linear layer of {linear.in_features}x{linear.out_features} "
                f"({dtype}) gives other bits for {count} rows than for 64; engine.exact=false serves without it"
            )
    return whole
