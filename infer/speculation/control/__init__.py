"""Adaptive speculation: cost model, acceptance model, and the planner that decides by both how far drafting pays."""
