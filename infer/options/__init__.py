"""The command line, and the meaning of its words: models, heads, trees, texts."""
