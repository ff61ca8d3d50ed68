"""Tensor parallelism in serving: the ranks, their communication, and how their processes start and end."""
