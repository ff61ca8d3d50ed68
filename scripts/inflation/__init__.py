"""Function-preserving enlargement of a small target and its head to the sizes of a large one, with the same logits.

It serves to measure speed: every matrix has the large model's shape, so a step costs as much as the large model's,
while text and acceptance length are those of the small model. New weights are random wherever other weights cancel
their effect.
"""

from __future__ import annotations

from scripts.inflation.head import inflate_head
from scripts.inflation.shapes import SHAPES, Shape, shape_of
from scripts.inflation.target import inflate_target, write_target

__all__ = ["SHAPES", "Shape", "inflate_head", "inflate_target", "shape_of", "write_target"]
