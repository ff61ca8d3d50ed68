"""Multi-token prediction: modules that a target ships, or new ones of the same form; config and module."""
