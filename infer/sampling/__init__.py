"""From logits to tokens: parameters, processors, the choice at every row, and what ends a text."""
