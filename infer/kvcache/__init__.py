"""The paged KV cache: its pool, who holds which block, and its tensors."""
