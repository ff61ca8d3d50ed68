"""Heads of other trainers against ours: `python -m tests.trainers` (models/formats/README.md)."""
