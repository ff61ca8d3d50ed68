"""Per-slot losses of drafts, and fused forms that do not materialise all logits."""
