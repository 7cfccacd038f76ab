"""A sign of life on stderr while something takes long."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """A spinner with the elapsed time where somebody watches stderr; nothing where it goes to a file."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        shown.add_task(what, total=None)
        yield
