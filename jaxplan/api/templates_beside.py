"""The templates priced beside the search and the check of the plan, on another core where there is one.

Searching, pricing and lowering all hold Python's lock: what is searched first of every template is asked of the process
that partitions the lowered step afterwards.  As soon as that has begun the rest is done here, where all wait for it.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..search import TIED_SEARCHER, Alike, Allowed, Space, StrategyProblem, Tied
from ..sharding import Beside
from .candidates import Pipeline
from .found import Found
from .rivals import layers, question, rival

WAIT_S = 0.05
"""Between two looks at whether the process is there: a tenth of what one template's search takes it."""


class TemplatesBeside:
    """As a context: a thread that prices the templates of a `space`; it ends with the context.

    Until `price` is called, when the space has been searched, it only asks the process `beside`: the searches of one
    space share what they work out, which is no thread's but one's at a time.  Where the context is left by an error
    (Ctrl-C is one), the template that is being priced is the last.
    """

    def __init__(
        self, pipeline: Pipeline, space: Space, input_pins: Mapping[int, Allowed], beside: Beside
    ) -> None:
        self._pipeline = copy.copy(pipeline)
        # what is being done is said by the thread that plans, in its own order
        self._pipeline.say = lambda text: None
        self._space, self._beside = space, beside
        self._pins = dict(pipeline.template_pins(input_pins))
        self._searched, self._wanted, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._than_s = math.inf
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jaxplan-templates")

    def __enter__(self) -> TemplatesBeside:
        held, questions = None, {}
        if self._pins and self._beside.there:
            held = layers(self._pipeline, self._space)
        if held is not None:
            # All at once, now: between two answers the thread would wait for Python's lock to put the next one.
            questions = {name: question(self._pipeline, self._space, pins) for name, pins in self._pins.items()}
        self._future: Future[dict[str, Found]] = self._threads.submit(self._priced, held, questions)
        return self

    def __exit__(self, *error: Any) -> None:
        for event in (self._ended, self._wanted, self._searched):
            event.set()
        self._threads.shutdown()

    def price(self, than_s: float = math.inf) -> None:
        """Go on to all that is to be done here; `than_s`: what the plan takes, if there is one."""
        self._than_s = than_s
        self._searched.set()

    def found(self) -> dict[str, Found]:
        """The templates that fit, by name, as soon as all of them are priced."""
        self._wanted.set()
        return self._future.result()

    def _priced(
        self, held: Tied | StrategyProblem | None, questions: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, Found]:
        known = {} if held is None else self._asked(held, questions)
        self._searched.wait()
        # what is done with the answers can wait until all do: for the partitioner
        while known and self._beside.free() and not self._wanted.wait(WAIT_S):
            pass
        found: dict[str, Found] = {}
        for name, pins in self._pins.items():
            if self._ended.is_set():
                break
            one = rival(self._pipeline, self._space, pins, known.get(name), self._than_s)
            if isinstance(one, Found):
                found[name] = one
        # the plan will ask for it
        _ = self._pipeline.traced.fingerprint
        return found

    def _asked(
        self, held: Tied | StrategyProblem, questions: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, Alike]:
        """What the process found of templates, by name, as long as it was free."""
        while not self._beside.free():
            if self._searched.wait(WAIT_S):
                return {}
        known: dict[str, Alike] = {}
        if self._beside.ask("hold", held, of=TIED_SEARCHER) is not True:
            return known
        for name, asked in questions.items():
            if self._ended.is_set() or not self._beside.free():
                break
            answer = self._beside.ask("search", *asked, of=TIED_SEARCHER)
            if answer is not None:
                known[name] = answer
        return known
