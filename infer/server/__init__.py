"""The OpenAI-compatible server: HTTP on one side, the engine's thread on the other."""
