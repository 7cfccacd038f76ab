"""The command line `jaxplan`: arguments, what is printed where, and exit codes; no planning of its own."""

from __future__ import annotations

from .commands import main as main
