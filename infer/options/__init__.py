"""What the words of a command line stand for: models, heads, trackers, texts."""
