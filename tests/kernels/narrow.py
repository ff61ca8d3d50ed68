"""Largest rounding errors of quantized weights, as a share of the largest weight with the same scale."""

from __future__ import annotations

ERROR = {"int8": 0.5 / 127, "fp8": 2**-4, "int4": 0.5 / 7}
