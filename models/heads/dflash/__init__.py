"""The DFlash head (arXiv 2602.06036): its config and its module."""
