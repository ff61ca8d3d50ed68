"""One module per endpoint, and the code that endpoints share."""
