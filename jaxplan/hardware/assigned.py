"""What a TPU program's temporaries take, from the buffer assignment that XLA writes down while it compiles.

`memory_analysis` reports the heap with its gaps counted once more, and with what buffers in the places of arguments
leave empty: of a GPT-2 XL's step on v5e 6.43 GB of temporaries, of which the heap, which has to be there beside the
arguments, is 4.20.  No number of it alone tells how much of either it is; the dump of the assignment does.
"""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

_ASSIGNMENT = "*after_optimizations-buffer-assignment.txt"
_HEAP = re.compile(r"allocation \d+: size (\d+)(, .*)?, preallocated-temp")

_heaps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def dumping(folder: str) -> dict[str, str | bool]:
    """What a compiler is told to write its buffer assignment into a folder."""
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def keep_heap(compiled: Any, folder: str) -> None:
    """Remember the heap that a dump into an empty `folder` tells of `compiled`; nothing where none was dumped."""
    for path in Path(folder).glob(_ASSIGNMENT):
        _heaps[compiled] = heap_bytes(path.read_text(encoding="utf-8"))


def kept_heap(compiled: Any) -> int | None:
    """Bytes of one device's main memory that a program's temporaries take, where `compile_for` saw them assigned."""
    return _heaps.get(compiled)


def heap_bytes(assignment: str) -> int:
    """The temporaries of XLA's text of a buffer assignment; memory of a colour is a core's own, not the main one."""
    found = map(_HEAP.match, assignment.splitlines())
    return sum(int(line[1]) for line in found if line and "color" not in (line[2] or ""))
