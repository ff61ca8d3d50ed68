"""One file per operation: its contract and the dispatch to its implementations. Independent of models."""
