"""Draft trees, the proposers that make them, and how they are verified."""
