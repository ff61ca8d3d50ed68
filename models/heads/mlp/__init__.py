"""The MLP speculator (arXiv 2404.19124): its config and its module."""
