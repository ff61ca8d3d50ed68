"""compressed-tensors, weights only: what llm-compressor writes as W4A16, W8A16 or fp8 without quantized activations.

`pack-quantized`: `weight_packed` int32 `[N, ceil(K * bits / 32)]` holds value + 2^(bits-1), packed along K, with the
shape in `weight_shape`; zero points, if any, are packed along N in the same way. The other formats store `weight`
unpacked, as int8 or fp8. `weight_scale` `[N, G]`, `[N, 1]` or `[1]`; `weight_g_idx` `[K]` holds the group of each
column if columns are not grouped in order.

Of several groups the library itself takes the one with the most exact target: a layer's name before a pattern, and that
before a class, wherever they stand. With `mixed-precision` each group states its own format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.weights.groups import GroupedRows
from models.fields import Fields
from models.quantized.scheme import INTEGERS, WORD, Scheme, centered, centered_zeros, column_groups, need, unpack

PACKED, MIXED = "pack-quantized", "mixed-precision"
STORED = {  # format -> (type, bits) that it may hold
    PACKED: (("int", 4), ("int", 8)),
    "int-quantized": (("int", 8),),
    "float-quantized": (("float", 8),),
    "naive-quantized": (("int", 8), ("float", 8)),
}
DTYPES = {"int": torch.int8, "float": torch.float8_e4m3fn}
# actorder -> whether weight_g_idx reorders columns: by group it does; None: unstated, so weight_g_idx decides
ORDERS = {None: None, "group": True, "dynamic": True, True: True, "weight": False, "static": False, False: False}
HISTORY = ("quantization_status", "global_compression_ratio", "version", "run_compressed")
PARTS = ("weight_scale", "weight", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx")


@dataclass(frozen=True)
class Group:
    """The storage of some layers. `size`: columns of a group; 0: a row, -1: the whole weight."""

    form: str
    kind: str
    bits: int
    size: int
    symmetric: bool
    reorders: bool | None  # columns, by weight_g_idx; None: if that is there


def read(fields: Fields) -> Scheme:
    form = fields.need("format", str)
    fields.only("kv_cache_scheme")
    fields.only("sparsity_config")
    fields.ignore(*HISTORY)
    ignored = _string_list(fields, "ignore")
    sections = fields.need_section("config_groups")
    groups: dict[str, Group] = {}  # by target; of two of one target the last counts
    for name in sections.values:
        section = sections.need_section(name)
        groups |= dict.fromkeys(_string_list(section, "targets"), _read_group(section, form))
    if not groups:
        raise ValueError(f"{sections.name}: names no group")
    kinds = ", ".join(dict.fromkeys(f"{group.kind}{group.bits}" for group in groups.values()))
    return Scheme(f"compressed-tensors {form}, {kinds}", PARTS, partial(_read_layer, groups=groups, ignored=ignored))


def _string_list(fields: Fields, key: str) -> Sequence[str]:
    texts = fields.take(key, list, [])
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{fields.name}: {key}={texts!r}: expected names")
    return texts


def _read_group(fields: Fields, form: str) -> Group:
    if form == MIXED:
        form = fields.need("format", str)
    else:
        fields.only("format", form)
    if form not in STORED:
        raise ValueError(f"{fields.name}: format={form!r}: only {', '.join(STORED)} are supported")
    for activations in ("input_activations", "output_activations"):
        if fields.maybe(activations, dict) is not None:
            raise ValueError(f"{fields.name}: {activations}: quantized activations are not supported, only weights")
    weights = fields.need_section("weights")
    fields.done()
    kind, bits = weights.take("type", str, "int"), weights.take("num_bits", int, 8)
    if (kind, bits) not in STORED[form]:
        raise ValueError(f"{weights.name}: type={kind!r}, num_bits={bits}: not supported in {form}")
    strategy, size = weights.need("strategy", str), weights.maybe("group_size", int)
    if strategy not in ("tensor", "channel", "group"):
        raise ValueError(f"{weights.name}: strategy={strategy!r}: only 'tensor', 'channel' and 'group' are supported")
    if strategy == "group" and (size is None or size < 1):
        raise ValueError(f"{weights.name}: group_size={size}: must be at least 1 with strategy 'group'")
    weights.only("dynamic", False)
    weights.only("block_structure")
    weights.ignore("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "actorder")
    order = weights.values.get("actorder")
    if order not in tuple(ORDERS):  # a tuple, because a JSON value may be unhashable
        raise ValueError(f"{weights.name}: actorder={order!r}: only {', '.join(map(str, ORDERS))} are supported")
    symmetric = weights.take("symmetric", bool, True)
    if not symmetric and form != PACKED:
        raise ValueError(f"{weights.name}: symmetric=false: only supported in {PACKED}")
    weights.done()
    columns = {"tensor": -1, "channel": 0}.get(strategy, size or 0)
    return Group(form, kind, bits, columns, symmetric, ORDERS[order])


def _matching(patterns: Iterable[str], layer: str) -> list[str]:
    """Return those of the patterns that name the layer: it alone, then patterns in alphabetical order, then classes."""
    named = {
        pattern: re.match(pattern[3:], layer) if pattern.startswith("re:") else pattern in (layer, "Linear")
        for pattern in patterns
    }
    matching = [pattern for pattern, match in named.items() if match]
    return sorted(matching, key=lambda pattern: (pattern != layer, not pattern.startswith("re:"), pattern))


def _read_layer(
    layer: str, parts: Mapping[str, Tensor], *, groups: Mapping[str, Group], ignored: Sequence[str]
) -> GroupedRows:
    if _matching(ignored, layer):
        raise ValueError("is quantized, and named under `ignore`")
    targets = _matching(groups, layer)
    if not targets:
        raise ValueError("is quantized, and no group of `config_groups` names it")
    group = groups[targets[0]]
    rows, columns = _shape(group, parts)
    size = columns if group.size < 1 else group.size
    count = -(-columns // size)
    scales = need(parts, "weight_scale")
    if group.size < 0:
        scales = scales.reshape(-1, 1).expand(rows, 1)
    if tuple(scales.shape) != (rows, count):
        raise ValueError(f"weight_scale {list(scales.shape)}: expected {[rows, count]}")
    order = column_groups(parts, "weight_g_idx", columns, count)
    if order is not None and group.reorders is False:
        raise ValueError("weight_g_idx: reorders the columns, and actorder says that nothing does")
    if group.reorders and "weight_g_idx" not in parts and count > 1:
        raise ValueError("weight_g_idx: missing, and actorder says that the columns are reordered")
    if order is None and columns % size:
        order = torch.arange(columns) // size
    zero_words = None
    if not group.symmetric:
        zero_words = need(parts, "weight_zero_point", -(-rows * group.bits // WORD), count)
    elif "weight_zero_point" in parts and not _all_zero(parts["weight_zero_point"], rows, group.bits):
        raise ValueError("weight_zero_point: is not zero everywhere, and symmetric=true says that it is")

    def integers() -> tuple[Tensor, Tensor | None]:
        if group.form != PACKED:
            return need(parts, "weight"), None
        values = centered(unpack(need(parts, "weight_packed"), group.bits)[:, :columns], group.bits)
        if zero_words is None:
            return values, None
        return values, centered_zeros(unpack(zero_words.t(), group.bits).t()[:rows], group.bits)

    weight_format = "fp8" if group.kind == "float" else INTEGERS[group.bits]
    return GroupedRows(weight_format, columns, scales, order, integers, layer)


def _all_zero(points: Tensor, rows: int, bits: int) -> bool:
    """Return whether zero points, packed or not, are all zero."""
    packed = points.dtype == torch.int32
    return not points.float().any() or (packed and centered_zeros(unpack(points.t(), bits).t()[:rows], bits) is None)


def _shape(group: Group, parts: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the rows and columns of a layer's weight. Raises ValueError for tensors of another shape or type."""
    if group.form == PACKED:
        rows, columns = map(int, need(parts, "weight_shape", 2))
        need(parts, "weight_packed", rows, -(-columns * group.bits // WORD))
        return rows, columns
    values = need(parts, "weight")
    if values.dtype != DTYPES[group.kind]:
        raise ValueError(f"weight: {values.dtype}, expected {DTYPES[group.kind]}")
    rows, columns = values.shape
    return rows, columns
