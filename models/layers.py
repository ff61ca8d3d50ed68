"""The few layers every target and head is made of: linear, norms, rotary embedding, MLPs.

They are independent of batches and caches: every tensor is `[..., features]`. A linear layer can be prepacked for
serving, after which the bits of its output do not depend on the number of rows (kernels/linear.py).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.elementwise import Activation, Gate, activate, add_rms_norm, gate_mul, layer_norm, rms_norm
from kernels.linear import PackedLinear, wide_linear
from kernels.weights.ggml import GgmlMatrix
from kernels.weights.groups import GroupedMatrix
from kernels.weights.quantize import WeightFormat
from models.config import RopeConfig


class Linear(nn.Linear):
    """`y = x Wᵀ + b`; plain torch for training, the packed form after `pack()` for serving.

    `out_dtype`: of y, by default x's (kernels/linear.py). `narrows`: `pack` may quantize the weight.
    """

    packed: PackedLinear | None = None
    out_dtype: torch.dtype | None = None
    narrows = True

    def pack(self, *, exact: bool = True, weight_format: WeightFormat = "same", quantize_rows: bool = False) -> None:
        """Replace the weight by its packed form. Irreversible: the unpacked weight is freed.

        `quantize_rows`: round the input to 8 bits too, where the weights are integers that a CPU kernel multiplies.
        """
        bias, stored = None if self.bias is None else self.bias.detach(), weight_format if self.narrows else "same"
        self.packed = PackedLinear(
            self.weight.detach(), bias, exact=exact, weight_format=stored, out_dtype=self.out_dtype
        )
        if quantize_rows:
            self.packed.quantize_rows()
        self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def pack_ggml(self, matrix: GgmlMatrix | GroupedMatrix) -> None:
        """Take a weight `[N, K]` that is stored in blocks or groups, and stays so. Raises ValueError if damaged."""
        bias = None if self.bias is None else self.bias.detach()
        self.packed = PackedLinear(matrix, bias, out_dtype=self.out_dtype)
        self.weight = nn.Parameter(torch.empty(0, dtype=matrix.dtype, device=matrix.device), requires_grad=False)

    def unpacked_weight(self) -> Tensor | None:
        """Return the weight `[N, K]`, packed or not; None if it was packed in fewer bits."""
        return self.weight.detach() if self.packed is None else self.packed.unpacked_weight()

    def forward(self, input: Tensor) -> Tensor:
        return self._unpacked(input) if self.packed is None else self.packed(input)

    def _unpacked(self, input: Tensor) -> Tensor:
        if self.out_dtype is None:
            return F.linear(input, self.weight, self.bias)
        if self.weight.dtype.itemsize < self.out_dtype.itemsize:
            rows = input.reshape(-1, self.in_features)
            return wide_linear(rows, self.weight, self.bias).view(*input.shape[:-1], self.out_features)
        out = F.linear(input, self.weight, self.bias)
        return out.to(torch.promote_types(out.dtype, self.out_dtype))  # of what autocast has rounded, if it has

    @property
    def fusible(self) -> PackedLinear | None:
        """The packed form, if `forward` does nothing else: then kernels may go on with its outputs."""
        return self.packed if type(self).forward is Linear.forward else None

    def add(self, residual: Tensor, input: Tensor) -> Tensor:
        """Return residual + y."""
        packed = self.fusible
        return residual + self(input) if packed is None else packed.add(residual, input)

    def gated(self, input: Tensor, gate: Gate) -> Tensor:
        """Return the activated first half of y, times its second half."""
        packed = self.fusible
        return gate_mul(self(input), gate) if packed is None else packed.gated(input, gate)


def make_lm_head(inputs: int, outputs: int, device: str | None = None) -> Linear:
    """Return an LM head. Its logits are in fp32, the dtype of their sums, whatever the model's: 16 bits make ties."""
    lm_head = Linear(inputs, outputs, bias=False, device=device)
    lm_head.out_dtype = torch.float32
    return lm_head


class Embedding(nn.Embedding):
    """A token embedding that is not initialized: whoever makes it fills it.

    On the meta device nn.Embedding's random values import torch's compiler and sympy, a second of every start.
    """

    def reset_parameters(self) -> None:
        pass


class PackedEmbedding(nn.Module):
    """A token embedding `[V, H]` in blocks, read row by row from a packed matrix, which may be the LM head's too."""

    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.packed = packed

    @property
    def weight(self) -> Tensor:
        """The dequantized matrix `[V, H]`, made anew, for heads that read or copy their target's embedding."""
        return self.packed.whole_weight()

    def forward(self, ids: Tensor) -> Tensor:
        return self.packed.weight_rows(ids.reshape(-1)).view(*ids.shape, -1)


class Divisible(nn.Module):
    """A module that computes with parts of its weight: `divide` makes linear layers of them, once, before packing."""

    def divide(self) -> None:
        raise NotImplementedError


def pack(
    module: nn.Module, *, exact: bool = True, weight_format: WeightFormat = "same", quantize_rows: bool = False
) -> None:
    """Pack every linear layer for serving, in place; parameters are freed, so the module can no longer be trained."""
    for child in list(module.modules()):
        if isinstance(child, Divisible):
            child.divide()
    for child in module.modules():
        if isinstance(child, Linear) and child.packed is None:
            child.pack(exact=exact, weight_format=weight_format, quantize_rows=quantize_rows)


@torch.no_grad()
def copy_packed(source: nn.Module, destination: nn.Module) -> None:
    """Overwrite the weights of a packed module by those of one that was made and packed alike. Addresses stay."""
    for old, new in zip(destination.modules(), source.modules(), strict=True):
        if isinstance(old, Linear) and old.packed is not None:
            assert isinstance(new, Linear)
            assert new.packed is not None
            old.packed.copy_(new.packed)
    for tensors in (nn.Module.parameters, nn.Module.buffers):
        for old, new in zip(tensors(destination), tensors(source), strict=True):
            old.copy_(new)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learnt scale, which with `centered` is 1 + weight (kernels/elementwise.py).

    Its output has the dtype of the weight, as the input of a product; with `inside` it stays in the residual stream, in
    the dtype of the input.
    """

    inside = False

    def __init__(self, size: int, eps: float, *, centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if centered else torch.ones(size))
        self.eps, self.centered = eps, centered

    @property
    def scale(self) -> Tensor:
        return 1 + self.weight if self.centered else self.weight

    def forward(self, x: Tensor) -> Tensor:
        out_dtype = x.dtype if self.inside else None
        return rms_norm(x, self.weight, self.eps, centered=self.centered, out_dtype=out_dtype)

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + delta, and the sum: the residual stream after and before the norm."""
        return add_rms_norm(x, delta, self.weight, self.eps, centered=self.centered)


class LayerNorm(RMSNorm):
    """Layer norm with a bias, in RMSNorm's place (kernels/elementwise.py)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, out_dtype=x.dtype if self.inside else None)

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total = x + delta
        return self(total), total


class PlainMLP(nn.Module):
    """`down(activation(up(x)))`."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, activation: Activation, bias: bool = True) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the MLP's output `[..., H]`, added to `residual` if there is one."""
        inner = activate(self.up_proj(x), self.activation)
        return self.down_proj(inner) if residual is None else self.down_proj.add(residual, inner)


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up merged into one linear; with `gelu`, GELU (tanh) instead of SiLU."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False, gelu: bool = False) -> None:
        super().__init__()
        self.gelu = gelu
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the MLP's output `[..., H]`, added to `residual` if there is one."""
        inner = self.gate_up_proj.gated(x, "gelu" if self.gelu else "silu")
        return self.down_proj(inner) if residual is None else self.down_proj.add(residual, inner)


def rope_frequencies(rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    """Return inverse frequencies `[head_dim / 2]` and the factor on cos and sin, for any type of HF's `rope_scaling`.

    default: arXiv 2104.09864. linear: positions divided by `factor`. llama3: frequencies of long wavelengths divided by
    `factor`, those of short ones kept, a linear ramp between. yarn: arXiv 2309.00071, with its attention factor.
    longrope: arXiv 2402.13753, a divisor for each frequency, and an attention factor.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    divisors = torch.tensor(rope.divisors) if rope.divisors else 1.0
    inverse = 1.0 / (divisors * rope.theta**exponents)
    p = dict(rope.parameters)
    if rope.rope_type in ("default", "longrope"):
        return inverse, p.get("attention_factor", 1.0)
    factor = p["factor"]
    if rope.rope_type == "linear":
        return inverse / factor, 1.0
    if rope.rope_type == "llama3":
        original = p["original_max_position_embeddings"]
        wavelength = 2 * math.pi / inverse
        low, high = original / p["low_freq_factor"], original / p["high_freq_factor"]
        ramp = (original / wavelength - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
        scaled = torch.where(wavelength > low, inverse / factor, inverse)
        medium = (wavelength <= low) & (wavelength >= high)
        return torch.where(medium, (1 - ramp) * inverse / factor + ramp * inverse, scaled), 1.0
    return _yarn_frequencies(inverse, rope.theta, head_dim, max_position_embeddings, p)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_frequencies(
    inverse: Tensor, theta: float, head_dim: int, max_position_embeddings: int, p: dict[str, float]
) -> tuple[Tensor, float]:
    original = p.get("original_max_position_embeddings") or max_position_embeddings
    factor = p["factor"]
    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        if p.get("mscale") and p.get("mscale_all_dim"):
            attention_factor = yarn_magnitude(factor, p["mscale"]) / yarn_magnitude(factor, p["mscale_all_dim"])
        else:
            attention_factor = yarn_magnitude(factor)

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(p.get("beta_fast") or 32.0), dimension_of(p.get("beta_slow") or 1.0)
    if p.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inverse / factor * ramp + inverse * (1 - ramp), attention_factor


class RotaryEmbedding:
    """Rotates query and key halves by their position, from a table of `max_position_embeddings` rows.

    Not an nn.Module: the table is computed in fp32 whatever dtype the model is cast to, on first use per device and
    dtype.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> None:
        self._sizes = rope, head_dim, max_position_embeddings
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def rows(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin `[..., 1, D]` for integer positions `[...]`, rounded to `dtype` as in HF's Llama."""
        cos, sin = self.tables(positions.device, dtype)
        return F.embedding(positions, cos).unsqueeze(-2), F.embedding(positions, sin).unsqueeze(-2)

    def tables(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin `[P, D]`, by position."""
        if (device, dtype) not in self._tables:
            self._tables[device, dtype] = self._build(device, dtype)
        return self._tables[device, dtype]

    def _build(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rope, head_dim, length = self._sizes
        inverse, factor = rope_frequencies(rope, head_dim, length)
        angles = torch.outer(torch.arange(length).float(), inverse)  # [P, D / 2]
        cos, sin = ((turned(angles) * factor).to(device, dtype) for turned in (torch.cos, torch.sin))
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


class Unrotated(RotaryEmbedding):
    """The rotation by no angle, which leaves every number as it is: layers and kernels need no case of their own."""

    def rows(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos = torch.ones(*positions.shape, 1, self._sizes[1], dtype=dtype, device=positions.device)
        return cos, torch.zeros_like(cos)
