"""Files and folders of runs: atomic writes, resuming, and reuse between runs."""
