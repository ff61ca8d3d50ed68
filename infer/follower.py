"""Entry point of a tensor parallel rank that rank 0 starts (infer/parallel/launch.py). Not to be run by hand.

It reads its settings from a pipe, and exits when rank 0 closes it.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.environment  # noqa: E402, F401

# isort: split

if __name__ == "__main__":
    from infer.parallel.children import read_settings

    settings = read_settings()
    # Imports that take seconds come only now: `read_settings` makes this process exit if rank 0 ends during them.
    from infer.parallel.launch import follow_parent

    follow_parent(settings)
