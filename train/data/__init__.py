"""Turns rows of data into the sequences that a head is trained on."""
