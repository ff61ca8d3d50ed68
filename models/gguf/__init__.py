"""GGUF files (llama.cpp's checkpoint format) as targets, read like a checkpoint folder. See models/README.md."""
