"""What rounding to few bits costs a weight at most, as a share of the largest of those that share its scale."""

from __future__ import annotations

ERROR = {"int8": 0.5 / 127, "fp8": 2**-4, "int4": 0.5 / 7}
