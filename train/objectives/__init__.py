"""Objectives by name: what is minimised when a head learns from a target."""

from __future__ import annotations

from train.objectives.ttt import TrainingTimeTest

__all__ = ["OBJECTIVES", "TrainingTimeTest"]

OBJECTIVES = {"ttt": TrainingTimeTest}
