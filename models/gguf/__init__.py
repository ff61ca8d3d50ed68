"""GGUF files as targets: what llama.cpp and its kin publish, read as a checkpoint folder is. See models/README.md."""
