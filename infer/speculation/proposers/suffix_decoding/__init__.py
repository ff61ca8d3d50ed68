"""Suffix decoding: copies from the text so far and from earlier responses."""
