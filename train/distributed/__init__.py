"""Distributed training: parallel strategies for head and optimiser, and communication between processes."""
