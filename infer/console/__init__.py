"""Input and output of the commands in a terminal."""
