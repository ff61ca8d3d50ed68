"""Files and folders of runs: whole or not there, resumed, and reused."""
