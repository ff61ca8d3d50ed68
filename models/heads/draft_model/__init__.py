"""A draft model, a smaller target that drafts (arXiv 2211.17192): its config and its module."""
