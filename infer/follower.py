"""One rank of a divided target, started by rank 0 (infer/parallel/launch.py). Not for people.

It waits for orders on a pipe.
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
    # Only now what takes seconds to import: rank 0 may have ended before that.
    from infer.parallel.launch import follow_parent

    follow_parent(settings)
