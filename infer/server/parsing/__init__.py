"""A model's text taken apart, and grammars looked at before they are compiled."""
