"""Entry point of a tensor parallel rank that rank 0 starts (infer/processes/children.py). Not to be run by hand."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: E402, F401

# isort: split

if __name__ == "__main__":
    from multiprocessing.connection import Connection

    from infer.processes.launch import follow_parent

    follow_parent(*(Connection(int(fd)) for fd in sys.argv[1:]))
