"""What is taken out of a running engine to train a head on."""
