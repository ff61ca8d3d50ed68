"""Checkpoint formats: what all of them share, and those that several heads are written in."""
