"""The torch oracles: plain, slow and in float64, so that a kernel has something to be right against."""
