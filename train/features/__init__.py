"""Features, the target's hidden states: computed in this process, or read from a store."""
