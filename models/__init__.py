"""Everything that has weights. Knows no optimiser, no scheduler and no HTTP."""
