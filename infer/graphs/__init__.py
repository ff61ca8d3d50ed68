"""CUDA graphs of verify steps, drafts and whole rounds, and overlap scheduling of rounds with the host."""
