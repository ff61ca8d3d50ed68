"""The paged KV cache: pool and block tables, ownership and prefix cache of pages, tensors, memory planning."""
