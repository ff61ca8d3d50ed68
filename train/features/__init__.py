"""The target's hidden states: taken in this process, or from a store."""
