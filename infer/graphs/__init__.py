"""CUDA graphs of verifies, drafts and whole rounds, and rounds that overlap with the host."""
