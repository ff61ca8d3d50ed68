"""Everything that has weights. Independent of optimiser, scheduler and HTTP."""
