"""The DSpark head (arXiv 2607.05147): its config and its module."""
