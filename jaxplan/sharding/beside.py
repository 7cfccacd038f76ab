"""The partitioner in a process of its own: Shardy's passes hold Python's lock, and other work goes on meanwhile.

Of a convolutional network of ten thousand operations the passes and the reading of what they made take seconds, of a
short program less than a process takes to begin: whoever has a large one starts the process early (`Beside`), and asks
it when it is ready.  What it answers is what `partition_imported` says here; where it can't answer, it is done here.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from .. import child
from .partitioner import Partitioned, imported_copy, partition_imported
from .pinned_module import with_pins
from .spec import Layout

Pins = Mapping[int, Sequence[tuple[tuple[int, ...], Layout | None]]]


class Beside:
    """As a context: a process that is asked by `Asked`, ended with the context; none, if it is not `wanted`."""

    def __init__(self, *, wanted: bool = True) -> None:
        self._wanted, self._ready = wanted, False
        self._child: child.Child | None = None

    def __enter__(self) -> Beside:
        # where it can't be started, nothing is beside
        with contextlib.suppress(OSError):
            if self._wanted:
                self._child = child.start(Path(__file__).with_name("partitioner_process.py"))
                child.send(self._child, sys.path)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._child is not None:
            child.end(self._child)
            self._child = None

    def ready(self) -> bool:
        """Whether there is a process and it has loaded what it needs."""
        if self._child is None:
            return False
        if not self._ready:
            self._ready = child.has_said(self._child, 0) and self._receive() is True
        return self._ready

    def ask(self, question: str, *about: Any) -> Any:
        """The answer to one of the questions of `_Module`; None where there is none to be had, then or later."""
        assert self._child is not None
        try:
            child.send(self._child, (question, about))
            return self._receive()
        except OSError:
            return None

    def _receive(self) -> Any:
        assert self._child is not None
        try:
            return child.receive(self._child)
        except EOFError:
            self.__exit__()
            return None


class Asked:
    """A lowered module that the partitioner is asked about, again after pins were written into it.

    `beside` answers where it is ready; where it fails, all that was said is said here once more.
    """

    def __init__(self, lowered: Any, beside: Beside | None = None) -> None:
        self._lowered, self._beside = lowered, beside if beside is not None and beside.ready() else None
        self._here: _Module | None = None
        self._pins: list[tuple[Any, ...]] = []
        if self._beside is not None:
            code = io.BytesIO()
            lowered.operation.write_bytecode(code)
            if self._beside.ask("load", code.getvalue()) is None:
                self._beside = None

    def partition(self, while_trips: float) -> Partitioned:
        """`partition_imported` of the module and its pins."""
        found = None if self._beside is None else self._beside.ask("partition", while_trips)
        return self._module().partition(while_trips) if found is None else found

    def pin(self, pins: Pins, number_of: Callable[[str], int], around: Callable[[str], str]) -> bool:
        """Pin results as `with_pins` does; False where the step has to be lowered for that."""
        pinned = None if self._beside is None else self._beside.ask("pin", pins, number_of, around)
        if pinned is None:
            pinned = self._module().pin(pins, number_of, around)
        if pinned:
            self._pins.append((pins, number_of, around))
        return bool(pinned)

    def _module(self) -> _Module:
        """The module here; from now on nobody beside is asked about it."""
        self._beside = None
        if self._here is None:
            self._here = _Module()
            self._here.load(self._lowered)
            for said in self._pins:
                self._here.pin(*said)
        return self._here


class _Module:
    """What is asked about, in whichever process."""

    def __init__(self) -> None:
        self._imported: Any = None

    def load(self, module: Any) -> bool:
        """`imported_copy` of a module, or of its bytecode."""
        self._imported = imported_copy(module)
        return True

    def partition(self, while_trips: float) -> Partitioned:
        return partition_imported(self._imported, while_trips=while_trips)

    def pin(self, pins: Pins, number_of: Callable[[str], int], around: Callable[[str], str]) -> bool:
        pinned = with_pins(self._imported, pins, number_of, around)
        if pinned is None:
            return False
        self._imported = pinned
        return True


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Say that all is loaded, then answer to the end: an error is answered by None, and met where it was asked."""
    module = _Module()
    answer: Any = True
    while True:
        pickle.dump(answer, answers)
        answers.flush()
        try:
            question, about = pickle.load(questions)
        except EOFError:
            return
        try:
            answer = getattr(module, question)(*about)
        except Exception:
            answer = None
