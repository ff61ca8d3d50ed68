"""What torch's libraries can do on this machine, found out by running an operation, never inferred from its dtype.

oneDNN has products of 16-bit rows on some processors only and raises where it has none; a build of torch may lack it.
Elsewhere torch multiplies such rows some sixty times slower than the same numbers in fp32. So what no kernel of ours
reads is widened to fp32, which every machine multiplies well.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
ROWS, INPUTS, OUTPUTS = 5, 64, 48  # of the layer that is tried


def prepack(weight: Tensor) -> Tensor:
    """Pack a weight `[N, K]` for oneDNN. Raises RuntimeError where it multiplies no rows of this dtype."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


def multiply(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply `[R, K]` by a weight of `prepack`. Bits of a row are equal for all R >= 2."""
    return torch.ops.mkldnn._linear_pointwise(rows.contiguous(), packed, bias, "none", [], "")


@cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies a prepacked weight by rows of `dtype` here, correctly."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(n, INPUTS, generator=generator).to(dtype) for n in (OUTPUTS, ROWS))
    try:
        product = multiply(rows, prepack(weight), None)
    except (RuntimeError, AttributeError):  # a torch without oneDNN has no such operation
        return False
    expected = rows.double() @ weight.double().T
    return bool((product.double() - expected).abs().max() <= TOLERANCE.get(dtype, 1e-5) * expected.abs().max())


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return in which dtype a CPU multiplies rows of `dtype` without a kernel of ours: itself, or fp32 for 16 bits."""
    return dtype if dtype.itemsize > 2 or onednn_multiplies(dtype) else torch.float32
