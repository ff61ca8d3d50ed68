"""Function-preserving enlargement: a small target and its head at the sizes of a large one, with the same logits.

What it is for: speed. Every matrix has the large model's shape, so a step costs what it costs there, while the text and
the acceptance length are those of the small model. New weights are random wherever something else cancels them.
"""

from __future__ import annotations

from scripts.inflation.head import inflate_head, write_head
from scripts.inflation.shapes import SHAPES, Shape, shape_of
from scripts.inflation.target import inflate_target, write_target

__all__ = ["SHAPES", "Shape", "inflate_head", "inflate_target", "shape_of", "write_head", "write_target"]
