"""What a draft costs at a slot, and forms of it that hold no logits."""
