"""The meaning of command-line words: models, heads, trackers, texts."""
