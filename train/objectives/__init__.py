"""Training objectives of heads: alignment with the target, draft states, and one objective per file."""
