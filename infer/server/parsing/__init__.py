"""Parsers of the model's output (reasoning, tool calls), and the check of grammars before they are compiled."""
