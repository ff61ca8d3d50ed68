"""The EAGLE-3 head (arXiv 2503.01840): its config and its module."""
