"""What a run will need, and what is refused, before it starts."""
