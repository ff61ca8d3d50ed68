"""One step of the engine: its phases, the scheduler, the runner of the target, and statistics."""
