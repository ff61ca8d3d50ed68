"""Inference: the engine, its proposers, and the commands that serve. Never imports train."""
