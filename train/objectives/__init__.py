"""What is minimised when a head learns from a target: alignment, draft states, and an objective per file."""
