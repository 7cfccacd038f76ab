"""The partitioner in a process of its own: Shardy's passes hold Python's lock, and other work goes on meanwhile.

Of a convolutional network of ten thousand operations the passes and the reading of what they made take seconds, of a
short program less than a process takes to begin: whoever has a large one starts the process early (`Beside`), and asks
it when it is ready.  What it answers is what `partition_imported` says here, and so are its errors; where there is no
process, or none any more, it is done here.  Until there is a module to be partitioned, others may have the process work
for them (`free`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from .. import child
from .partitioner import Partitioned, imported_copy, partition_imported
from .pinned_module import with_pins
from .spec import Layout

Pins = Mapping[int, Sequence[tuple[tuple[int, ...], Layout | None]]]


PARTITIONER = "jaxplan.sharding.beside:Module"
"""Who answers what `Asked` asks."""


class Beside:
    """As a context: a process that is asked by `Asked`, ended with the context; none, if it is not `wanted`.

    `others`: who else there answers, "module:class" each, made there without arguments; a question is a method of one.
    """

    def __init__(self, *, wanted: bool = True, others: Sequence[str] = ()) -> None:
        self._wanted, self._others, self._ready, self._partitions = wanted, others, False, False
        self._child: child.Child | None = None
        # one question at a time, whichever thread asks
        self._lock = threading.Lock()

    def __enter__(self) -> Beside:
        # where it can't be started, nothing is beside
        with contextlib.suppress(OSError):
            if self._wanted:
                self._child = child.start(Path(__file__).with_name("beside_process.py"))
                child.send(self._child, (sys.path, (PARTITIONER, *self._others)))
        return self

    def __exit__(self, *error: Any) -> None:
        if self._child is not None:
            child.end(self._child)
            self._child = None

    @property
    def there(self) -> bool:
        """Whether there is a process, ready or not."""
        return self._child is not None

    def ready(self) -> bool:
        """Whether there is a process and it has loaded what it needs."""
        if self._child is not None and not self._ready:
            with self._lock:
                self._ready = child.has_said(self._child, 0) and self._receive() is True
        return self._child is not None and self._ready

    def free(self) -> bool:
        """Whether it is ready, and nothing is partitioned there yet: who checks a plan is not kept waiting."""
        return not self._partitions and self.ready()

    def ask(self, question: str, *about: Any, of: str = PARTITIONER) -> Any:
        """The answer of one of them; None where there is no process to answer, then or later.

        Raises:
          What the question raised there, with where it did.
        """
        with self._lock:
            if self._child is None:
                return None
            try:
                child.send(self._child, (of, question, about))
                answer = self._receive()
            except OSError:
                # it ended before it was asked: a pipe that nobody reads any more
                self.__exit__()
                return None
        if isinstance(answer, _Failed):
            raise answer.error
        return answer

    def reserve(self) -> None:
        """From now on it is not `free`: a module is on its way."""
        self._partitions = True

    def load(self, code: bytes, platform: str = "cpu") -> bool:
        """Have a module partitioned there, from its bytecode, as XLA for a platform does; False where it isn't."""
        self.reserve()
        return self.ask("load", code, platform) is True

    def _receive(self) -> Any:
        assert self._child is not None
        try:
            return child.receive(self._child)
        except EOFError:
            self.__exit__()
            return None


class Asked:
    """A lowered module that the partitioner is asked about, again after pins were written into it.

    `platform`: whose XLA imports it.  `beside` answers where it is ready; where it ends, all that was said is said here
    once more.
    """

    def __init__(self, lowered: Any, beside: Beside | None = None, *, platform: str = "cpu") -> None:
        self._platform = platform
        self._lowered, self._beside = lowered, beside if beside is not None and beside.ready() else None
        self._here: Module | None = None
        self._pins: list[tuple[Any, ...]] = []
        self._begun: concurrent.futures.Future[Partitioned | None] | None = None
        self._code = b""
        if self._beside is not None:
            code = io.BytesIO()
            lowered.operation.write_bytecode(code)
            self._code = code.getvalue()

    def begin(self, while_trips: float) -> None:
        """Have it partitioned beside, where there is a process; `partition` waits for what comes of it."""
        if self._beside is not None and self._begun is None:
            self._beside.reserve()
            threads = concurrent.futures.ThreadPoolExecutor(max_workers=1)
            self._begun = threads.submit(self._answer, self._beside, while_trips)
            threads.shutdown(wait=False)

    def partition(self, while_trips: float) -> Partitioned:
        """`partition_imported` of the module and its pins."""
        self.begin(while_trips)
        begun, self._begun = self._begun, None
        found = None if begun is None else begun.result()
        return self._module().partition(while_trips) if found is None else found

    def _answer(self, beside: Beside, while_trips: float) -> Partitioned | None:
        """What a process says of the module, which it is given first; None where there is none any more."""
        code, self._code = self._code, b""
        return beside.ask("partition", while_trips) if not code or beside.load(code, self._platform) else None

    def pin(self, pins: Pins, number_of: Callable[[str], int], around: Callable[[str], str]) -> bool:
        """Pin results as `with_pins` does; False where the step has to be lowered for that."""
        pinned = None if self._beside is None else self._beside.ask("pin", pins, number_of, around)
        if pinned is None:
            pinned = self._module().pin(pins, number_of, around)
        if pinned:
            self._pins.append((pins, number_of, around))
        return bool(pinned)

    def _module(self) -> Module:
        """The module here; from now on nobody beside is asked about it."""
        self._beside = None
        if self._here is None:
            self._here = Module()
            self._here.load(self._lowered, self._platform)
            for said in self._pins:
                self._here.pin(*said)
        return self._here


class Module:
    """What is asked about, in whichever process."""

    def __init__(self) -> None:
        self._imported: Any = None

    def load(self, module: Any, platform: str = "cpu") -> bool:
        """`imported_copy` of a module, or of its bytecode."""
        self._imported = imported_copy(module, platform)
        return True

    def partition(self, while_trips: float) -> Partitioned:
        return partition_imported(self._imported, while_trips=while_trips)

    def pin(self, pins: Pins, number_of: Callable[[str], int], around: Callable[[str], str]) -> bool:
        pinned = with_pins(self._imported, pins, number_of, around)
        if pinned is None:
            return False
        self._imported = pinned
        return True


class _Failed(NamedTuple):
    """What is answered in place of an answer."""

    error: Exception


def _failed(error: Exception) -> _Failed:
    """An error as it can be sent, with where it was met; what can't be sent as it is goes by its words."""
    where = f"In the partitioner's process:\n{''.join(traceback.format_tb(error.__traceback__))}"
    try:
        sent: Exception = pickle.loads(pickle.dumps(error))
    except Exception:  # of whatever kind, with whatever arguments
        sent = RuntimeError(f"{type(error).__name__}: {error}")
    sent.add_note(where)
    return _Failed(sent)


def serve(questions: BinaryIO, answers: BinaryIO, answering: Mapping[str, Any]) -> None:
    """Say that all is loaded, then answer to the end; an error is sent back, to be raised where it was asked for."""
    answer: Any = True
    while True:
        pickle.dump(answer, answers)
        answers.flush()
        try:
            of, question, about = pickle.load(questions)
        except EOFError:
            return
        try:
            answer = getattr(answering[of], question)(*about)
        except Exception as error:
            answer = _failed(error)
