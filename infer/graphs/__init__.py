"""CUDA graphs of whole decode steps and of their forwards, and overlap scheduling of steps with the host."""
