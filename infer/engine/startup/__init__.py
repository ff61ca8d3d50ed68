"""What an engine does before its first request: it measures what steps and drafts cost, and makes their planner."""
