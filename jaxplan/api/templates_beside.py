"""The templates priced beside the partitioner's check of the plan: their solver runs on another core meanwhile."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..search import Allowed, Space
from .candidates import Pipeline
from .found import Found


class TemplatesBeside:
    """As a context: a thread that prices the templates of a `space`, which has been searched; it ends with the context.

    Where the context is left by an error (Ctrl-C is one), the template that is being priced is the last.
    """

    def __init__(self, pipeline: Pipeline, space: Space, input_pins: Mapping[int, Allowed]) -> None:
        self._pipeline = copy.copy(pipeline)
        # what is being done is said by the thread that plans, in its own order
        self._pipeline.say = lambda text: None
        self._space, self._input_pins = space, input_pins
        self._ended = threading.Event()
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jaxplan-templates")

    def __enter__(self) -> TemplatesBeside:
        self._future: Future[dict[str, Found]] = self._threads.submit(self._priced)
        return self

    def __exit__(self, *error: Any) -> None:
        self._ended.set()
        self._threads.shutdown()

    def found(self) -> dict[str, Found]:
        """The templates that fit, by name, as soon as all of them are priced."""
        return self._future.result()

    def _priced(self) -> dict[str, Found]:
        found: dict[str, Found] = {}
        for name, one in self._pipeline.templates(self._space, self._input_pins):
            if isinstance(one, Found):
                found[name] = one
            if self._ended.is_set():
                break
        return found
