"""The P-EAGLE head (arXiv 2602.01469): its config and its module."""
