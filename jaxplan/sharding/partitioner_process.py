"""The process of `beside`, run by its path: it reads the search path of modules first, and then questions."""

import os
import pickle
import sys

if __name__ == "__main__":
    # What a pass prints must not end up between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path[:] = pickle.load(sys.stdin.buffer)
    from jaxplan.sharding.beside import serve

    serve(sys.stdin.buffer, answers)
