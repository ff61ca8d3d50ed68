"""One file per operation: its contract and its dispatch. Knows no model."""
