"""`python -m jaxplan`: the command line, without the script that installation puts on PATH."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
