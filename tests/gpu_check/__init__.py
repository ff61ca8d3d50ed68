"""Runs the tests and measurements of a GPU in processes side by side and keeps one report (scripts/README.md).

What is checked lies beside the kernels' tests, marked `gpu`, and what is timed in `measure_*.py` there. `runner.py`
starts processes of pytest, each with `plugin.py`, which takes a share of the tests.
"""
