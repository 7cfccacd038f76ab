"""A flag that compiled kernels look at while they run, raised at a deadline: a kernel may take seconds."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

#: What a kernel is given that nothing is to stop.
NEVER: NDArray[np.uint8] = np.zeros(1, dtype=np.uint8)


class Alarm:
    """`flag[0]` is 1 from the deadline of `until` on; kernels that release Python's lock see it at once."""

    def __init__(self) -> None:
        self.flag: NDArray[np.uint8] = np.zeros(1, dtype=np.uint8)

    def ring(self) -> None:
        """Raise the flag."""
        self.flag[0] = 1

    @contextmanager
    def until(self, deadline: float) -> Iterator[None]:
        """Within the context the flag is raised at `deadline`, in seconds of `time.monotonic`; before, it is down."""
        self.flag[0] = 0
        if math.isinf(deadline) and deadline > 0:
            yield
            return
        timer = threading.Timer(max(deadline - time.monotonic(), 0.0), self.ring)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
