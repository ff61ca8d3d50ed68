"""The EAGLE head (arXiv 2401.15077): its config and its module."""
