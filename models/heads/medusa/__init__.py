"""Medusa heads (arXiv 2401.10774): their config and their module."""
