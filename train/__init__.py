"""Training of draft heads: from a target through its features to an exported head."""
