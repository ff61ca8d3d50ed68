"""Several processes: how head and optimiser are divided, and what is exchanged."""
