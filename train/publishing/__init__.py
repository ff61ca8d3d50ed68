"""Exported heads, cards, plots and trackers."""
