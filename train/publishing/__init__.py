"""Exported heads, cards, reports and trackers."""
