"""Sizes for a run in Triton's interpreter (kernels/README.md), where a step takes some 200 times as long.

The same tests over less: shorter prompts and answers, fewer rounds, a smaller target.
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
