"""The folds of one problem, each worked out once: searches of it under other limits, or with pins, share them."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import replace

from .alike import Contents, colours
from .base import Incumbent, SearchResult, Termination
from .contract import Matrices
from .problem import Ints, StrategyProblem
from .quotient import Quotient
from .tied import Tied, tie
from .tied_search import Alike, search_tied

#: Steps of colour refinement, one fold after the other while the gap is open.  A layer of a transformer is about
#: five edges long, by its residual stream.
DEPTHS = (3, 6, 12)

#: A problem is folded when that leaves at most this share of its nodes.
FOLDED_SHARE = 0.5

#: A problem is mostly made of repeated blocks when its first colours are at most this share of its nodes.  The folds
#: of U-Net (0.22) and Inception (0.26) take longer than the whole, which is proved within 1e-4, and where memory binds
#: they leave gaps of percents; of ResNet-152 (0.09), ViT (0.06) and unrolled language models the fold is faster.
REPEATED_SHARE = 0.15


class Folds:
    """The folds of a well-formed `problem`, whose own memory limit is left aside: each search names its own."""

    def __init__(self, problem: StrategyProblem) -> None:
        self.problem = problem
        self.matrices = Matrices()
        self._colour: dict[int, Ints] = {}
        self._quotients: dict[int, Quotient | None] = {}
        self._tied: dict[int, Tied | None] = {}

    @functools.cached_property
    def repeats(self) -> bool:
        """Whether the problem is mostly made of blocks that are alike: its fold is searched before, or without, it."""
        return _colour_count(self._colours(DEPTHS[0])) <= REPEATED_SHARE * len(self.problem.nodes)

    def _colours(self, depth: int) -> Ints:
        if depth not in self._colour:
            self._colour[depth] = colours(self.problem, self._contents, depth)
        return self._colour[depth]

    def quotient(self, depth: int, limit_bytes: int | None) -> Quotient | None:
        """The contracted quotient by the colours of `depth` steps; None where too many colours are left."""
        if depth not in self._quotients:
            colour = self._colours(depth)
            folds = _colour_count(colour) <= FOLDED_SHARE * len(self.problem.nodes)
            self._quotients[depth] = (
                Quotient(self.problem, self._contents, colour, self.matrices).contract() if folds else None
            )
        found = copy.copy(self._quotients[depth])
        if found is not None:
            found.problem = self._within(limit_bytes)
        return found

    def tied(self, depth: int, limit_bytes: int | None) -> Tied | None:
        """The tied problem of that quotient; None without one, or where some colour can't choose alike at all."""
        if depth not in self._tied:
            quotient = self.quotient(depth, None)
            self._tied[depth] = None if quotient is None else tie(quotient)
        tied = self._tied[depth]
        return tied and replace(tied, problem=replace(tied.problem, limit_bytes=limit_bytes))

    def layers(self, limit_bytes: int | None) -> Tied | None:
        """The tied problem that `alike` searches."""
        return self.tied(DEPTHS[0], limit_bytes)

    def alike(
        self,
        limit_bytes: int | None,
        kept: Mapping[int, Ints] | None = None,
        *,
        time_limit_s: float | None = None,
        relative_gap: float = 1e-4,
        seed: int = 0,
        enough_s: float = math.inf,
        known: Alike | None = None,
    ) -> SearchResult | None:
        """The cheapest assignment in which nodes that are alike choose alike; nothing is proved of any other.

        Args:
          kept: by node, the strategies that are left to it (ascending); every one, where it isn't named.
          enough_s: only what costs less is wanted; where nothing does, what is returned may cost anything.
          known: what `search_tied` finds, where it has been asked already.

        Returns None where the problem does not fold, or where nodes that are alike have nothing in common left.
        """
        if known is None:
            tied = self.layers(limit_bytes)
            if tied is None:
                return None
            known = search_tied(
                tied, kept or {}, time_limit_s=time_limit_s, relative_gap=relative_gap, seed=seed, enough_s=enough_s,
                matrices=self.matrices,
            )  # fmt: skip
        found, assignment = known
        if found is None:
            return None
        best = self._incumbent.aside()
        if not found.found:
            return best.result(found.termination, found.reason)
        best.offer(assignment, found.objective_s)
        return replace(best.result(Termination.FEASIBLE), folded_s=best.objective_s, wall_s=found.wall_s)

    @functools.cached_property
    def _contents(self) -> Contents:
        return Contents(self.problem, self.matrices)

    @functools.cached_property
    def _incumbent(self) -> Incumbent:
        """Prices assignments of the original, whatever their peak: the tied problem keeps the limit."""
        return Incumbent(replace(self.problem, limit_bytes=None))

    def _within(self, limit_bytes: int | None) -> StrategyProblem:
        return replace(self.problem, limit_bytes=limit_bytes)


def _colour_count(colour: Ints) -> int:
    return int(colour.max(initial=-1)) + 1
