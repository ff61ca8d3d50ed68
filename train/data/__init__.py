"""From rows to the sequences that a head learns from."""
