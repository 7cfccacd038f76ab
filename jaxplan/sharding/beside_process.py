"""The process of `beside`, run by its path: it is told the search path of modules and whom to ask, then asked."""

import gc
import os
import pickle
import pkgutil
import sys

if __name__ == "__main__":
    # What a pass prints must not end up between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path[:], names = pickle.load(sys.stdin.buffer)
    from jaxplan.sharding.beside import serve

    # It lives as long as one plan is made, and what it reads of a module are hundreds of thousands of objects.
    gc.disable()
    serve(sys.stdin.buffer, answers, {name: pkgutil.resolve_name(name)() for name in names})
