"""What a run needs before its first step: target and engine, head and objective, features."""
