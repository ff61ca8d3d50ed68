"""Training of a head on what a server serves with it, in a process beside the server."""
