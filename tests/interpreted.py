"""Sizes for a run in Triton's interpreter (kernels/README.md), where a step takes some 200 times as long.

The tests are the same, but prompts and outputs are shorter, rounds fewer and the target smaller.
"""

from __future__ import annotations

import os
from typing import TypeVar

import torch

from kernels.triton import SWITCH

T = TypeVar("T")
INTERPRETED = os.environ.get(SWITCH) == "triton" and not torch.cuda.is_available()


def scaled(usual: T, interpreted: T) -> T:
    return interpreted if INTERPRETED else usual
