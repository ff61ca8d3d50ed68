"""JSON schemas as grammars: which keywords are enforced, and the schema that llguidance gets."""
