"""How weights are stored: 8 and 4 bits by rows and in groups, ggml's blocks, and the tiles of both for Triton."""
