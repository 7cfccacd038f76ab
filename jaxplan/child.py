"""Scripts of ours that run in processes of their own and are spoken to in pickles, over pipes."""

from __future__ import annotations

import pickle
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

Child = subprocess.Popen[bytes]


def start(script: Path) -> Child:
    """Run a script by its path.

    Raises:
      OSError: it can't be started.
    """
    return subprocess.Popen(
        # -P: the modules beside it are no top-level modules.
        [sys.executable, "-P", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ctrl-C is for whoever asks, who ends the child.
        start_new_session=True,
    )


def send(child: Child, message: Any) -> None:
    """Raises BrokenPipeError where the child has ended."""
    assert child.stdin is not None
    pickle.dump(message, child.stdin)
    child.stdin.flush()


def has_said(child: Child, within_s: float | None) -> bool:
    """Whether there is something to receive, if only the end, `within_s` seconds; None: as long as it takes."""
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        return bool(selector.select(within_s))


def receive(child: Child) -> Any:
    """What it says next.

    Raises:
      EOFError: it has ended, also within what it said.
    """
    assert child.stdout is not None
    try:
        return pickle.load(child.stdout)
    except pickle.UnpicklingError as error:
        raise EOFError(str(error)) from None


def end(child: Child) -> None:
    """Kill it and close the pipes."""
    child.kill()
    child.communicate()
