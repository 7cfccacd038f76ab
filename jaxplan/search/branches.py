"""Parts of a problem, each bounded within a budget by prices of its own.

A bound by prices on memory is that of mixtures: half of an assignment that overflows at one time step and half of one
that overflows at another are within the budget together, and neither is.  Where it is one node whose strategies make
the difference, the problem is parted by them: each part has prices of its own, and the least of the parts' bounds is
a bound of the whole, often a far higher one.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from . import moves
from .dual import DualAscent
from .frontier_elimination import Rows
from .known import Floor
from .problem import Ints, StrategyProblem
from .program import OutOfTime

#: Sweeps at each price, and with the best prices at the end.
SWEEPS, LAST_SWEEPS = 4, 40

#: After so many prices that gain less than this part of a step, steps become shorter, to this part, down to the least.
PATIENCE, LEAST_GAIN, SHORTER, LEAST_STEP = 5, 1e-3, 0.5, 0.005

#: Prices that one climb tries at most: where costs cancel out, gains need not end.
MOST_PRICES = 200

#: Prices are moved so often, and once more only if that raised the bound by this part of what it may rise by.
MOST_CLIMBS, GAIN = 8, 0.02

#: Prices that are tried for one time step in the end, and the factor from one to the next as long as all are too low.
HALVINGS, FARTHER = 8, 2.0

#: A bound that settled prices bring less than this part of the way to what is needed is given up.
HOPE = 0.1

#: What the bound may rise by where nothing within the budget is known, as a part of it.
OPEN = 0.1

#: Time steps whose bytes are priced.
MOST_ROWS = 3

#: Assignments that were cheapest at prices near the best: of those with the highest bounds so many are compared.
COMPARED = 12

#: Strategies of one node that are taken apart one by one at most, the sweeps after which one is
#: judged, and nodes that are tried in vain at most.
MOST_APART, TRIED_SWEEPS, MOST_FAILED = 16, 16, 24

#: Nodes that are tried for parting, those first whose bytes make most of a difference; and
#: where no price is there to begin with, which takes a climb each.
CANDIDATES, UNPRICED = 24, 8


class Branch:
    """A part of a problem and its bound within a budget.

    Attributes:
      problem: the whole; left: by strategy, whether this part has it and it can be within the limit, the budget.
      dual: with the best prices that were found; by_byte: these by time step, seconds a byte.
      settled: whether better prices were looked for until there were none.
    """

    def __init__(
        self, problem: StrategyProblem, limit: int, *, by_byte: Mapping[int, float], best_s: float = math.inf
    ) -> None:
        """Price the whole; by_byte: prices to begin with; best_s: what something within the budget costs."""
        dual = DualAscent(replace(problem, limit_bytes=max(limit, 1)))
        dual.set_prices({row: one * max(limit, 1) for row, one in by_byte.items()})
        self.problem, self.left = problem, np.ones(dual.node_s.size, dtype=np.bool_)
        self._begin(dual, limit, best_s)
        self.raise_bound()

    def _begin(self, dual: DualAscent, limit: int, best_s: float) -> None:
        self.dual, self.limit, self._best_s = dual, limit, best_s
        self._cheapest: list[tuple[float, Ints, dict[int, float]]] = []
        self._whole_yet, self.settled = True, False
        left = moves.fitting(dual.flat, limit, self.left)
        dual.forbid(self.left & ~left)
        self.left = left

    def within(self, limit: int, best_s: float) -> Branch:
        """The same part within another budget, in which something costs `best_s`, from the prices that this one has."""
        other = copy.copy(self)
        other._begin(self.dual.within(max(limit, 1)), limit, best_s)
        other.raise_bound()
        return other

    def _only(self, node: int, strategies: Ints, enough_s: float, need_s: float) -> Branch:
        """What has one of some strategies at a node; a bound of `enough_s` is as good as a higher one, and one under
        `need_s` as none.
        """
        other = copy.copy(self)
        at, size = self.dual.flat.at[node], self.dual.flat.size[node]
        other.left = self.left.copy()
        other.left[at : at + size] = False
        other.left[at + strategies] = True
        other._begin(self.dual.only(node, strategies), self.limit, self._best_s)
        other.raise_bound(enough_s, need_s)
        return other

    @property
    def bound_s(self) -> float:
        """Nothing of this part within the budget is faster."""
        return self.dual.bound_s()

    def floor(self, low_s: float = -math.inf) -> Floor:
        """What that proves of smaller budgets; nothing is faster than `low_s` anyway."""
        if low_s >= self.bound_s:
            return Floor(limit=self.limit, target_s=low_s)
        return Floor(limit=self.limit, target_s=self.bound_s, price_s=sum(self.by_byte.values()))

    def parted(self, enough_s: float, target_s: float, deadline: float = math.inf) -> list[Branch] | None:
        """This part in parts, none of which has a bound under `enough_s`; none is raised any farther over `target_s`.

        None if there is no way that soon leads there; asked again it still is None.

        Raises:
          OutOfTime: the deadline came first, in `time.monotonic` seconds.
        """
        if not self._whole_yet:
            return None
        for node, groups in self._contested():
            parts: list[Branch] = []
            for group in groups:
                _look_at_the_clock(deadline)
                parts.append(self._only(node, group, target_s, enough_s))
                if parts[-1].bound_s < enough_s:
                    break
            else:
                return parts
        undecided = self._undecided(enough_s, target_s, deadline)
        if undecided is not None:
            node, groups = undecided
            return [self._only(node, group, target_s, -math.inf) for group in groups]
        self._whole_yet = False
        return None

    def _undecided(self, enough_s: float, target_s: float, deadline: float) -> tuple[int, list[Ints]] | None:
        """The node that raises the bound most if its strategies are taken one at a time, whatever they hold in memory,
        and these: messages leave a bound too low where what is cheapest here and there does not go together.
        """
        dual, flat, bound_s, best = self.dual, self.dual.flat, self.bound_s, None
        neighbours, low_s, failed = np.diff(flat.near_start), enough_s, 0
        for node in np.argsort(-neighbours, kind="stable").tolist():
            left = self._left(node)
            extra_s = dual.node_s[flat.at[node] + left]
            extra_s = extra_s - extra_s.min()
            near, far = left[extra_s < target_s - bound_s], left[extra_s >= target_s - bound_s]
            if left.size < 2 or near.size > MOST_APART:
                continue
            least_s = target_s if far.size else math.inf
            for strategy in near[np.argsort(extra_s[np.isin(left, near)], kind="stable")].tolist():
                _look_at_the_clock(deadline)
                alone = dual.only(node, np.array([strategy]))
                for _ in range(TRIED_SWEEPS):
                    alone.sweep()
                least_s = min(least_s, alone.bound_s())
                if least_s < low_s:
                    failed += 1
                    break
            else:
                low_s = least_s
                best = node, [*(near[i : i + 1] for i in range(near.size)), *([far] if far.size else [])]
            if low_s >= target_s or failed == MOST_FAILED:
                break
        return best

    def _contested(self) -> list[tuple[int, list[Ints]]]:
        """Nodes that cheap assignments disagree about at the priced time steps, and their strategies by bytes there:
        first those among which the cheapest assignment has its own.
        """
        distinct: dict[bytes, Ints] = {}
        price: dict[int, float] = {}
        for _, chosen, prices in sorted(self._cheapest, key=lambda one: -one[0]):
            if len(distinct) < COMPARED:
                distinct.setdefault(chosen.tobytes(), chosen)
                price |= {row: max(one, price.get(row, 0.0)) for row, one in prices.items()}
        best = list(distinct.values())
        rows = np.array(sorted(price), dtype=np.int64)
        alive = Rows(self.problem, rows)
        worth = np.array([price[row] for row in rows.tolist()])
        differing: list[tuple[float, int]] = []
        for node, costs in enumerate(self.problem.nodes):
            if costs.costs_s.size > 1 and rows.size:
                sizes = alive.of_node(node)[[int(chosen[node]) for chosen in best]]
                differing.append((-float((np.ptp(sizes, axis=0) * worth).max()), node))
        found = []
        for spread, node in sorted(differing)[: CANDIDATES if self.dual.price else UNPRICED]:
            left, cheapest = self._left(node), int(best[0][node])
            _, group = np.unique(alive.of_node(node)[left], axis=0, return_inverse=True)
            group = group.reshape(-1)
            first = int(group[left == cheapest].max(initial=-1))
            numbers = sorted(set(group.tolist()), key=lambda number: (number != first, number))
            if spread < 0 and len(numbers) > 1:
                found.append((node, [left[group == number] for number in numbers]))
        return found

    def _left(self, node: int) -> Ints:
        at, size = self.dual.flat.at[node], self.dual.flat.size[node]
        return np.flatnonzero(self.left[at : at + size])

    def raise_bound(self, enough_s: float = math.inf, need_s: float = -math.inf) -> None:
        """Raise the bound by prices on the bytes at the time steps that overflow, until that ends or it is enough.

        With little hope of `need_s` it is given up.
        """
        enough_s, bound_s, open_s = min(enough_s, self._best_s), self.bound_s, 0.0
        for turn in range(MOST_CLIMBS):
            if bound_s > enough_s:
                break
            open_s = max(self._best_s - bound_s, LEAST_STEP * abs(bound_s))
            open_s = min(open_s, OPEN * abs(bound_s), max(enough_s - bound_s, LEAST_STEP * abs(bound_s)))
            others = self._settle_all()
            if self.dual.price and not turn and self.bound_s - bound_s < HOPE * (need_s - bound_s):
                self.settled = False
                return
            if others:
                self._climb(enough_s, open_s)
                self._settle_all()
            before_s, bound_s = bound_s, self.bound_s
            if not others or bound_s - before_s <= GAIN * open_s:
                break
        self.settled = bound_s <= enough_s or bound_s > self._best_s
        self._spare(LEAST_GAIN * open_s)
        for _ in range(LAST_SWEEPS):
            self.dual.sweep()
        self.by_byte = {row: price / max(self.limit, 1) for row, price in self.dual.price.items()}

    def _settle_all(self) -> bool:
        """Settle every price; whether there is more to be priced than one time step."""
        rows = sorted(self.dual.price)
        return any([self._settle(row) for row in rows]) or len(rows) != 1

    def _climb(self, enough_s: float, open_s: float) -> None:
        """Move the prices along the overflow: Polyak's steps, as if the bound could rise by `open_s`, ever shorter ones
        from the best prices so far.
        """
        dual, top_s, best, since, step = self.dual, -math.inf, self.dual.price, 0, 1.0
        for _ in range(MOST_PRICES):
            if step < LEAST_STEP or top_s > enough_s:
                break
            bound_s, alive = self._look()
            since = 0 if bound_s - top_s > LEAST_GAIN * step * open_s else since + 1
            if bound_s > top_s:
                top_s, best = bound_s, dual.price
            if not dual.price and alive.max(initial=0) <= self.limit:
                break
            if since == PATIENCE:
                step, since = step * SHORTER, 0
                dual.set_prices(best)
                continue
            dual.reprice(alive, step * open_s)
            if len(dual.price) > MOST_ROWS:
                most = sorted(dual.price, key=lambda row: (-dual.price[row], row))[:MOST_ROWS]
                dual.set_prices({row: dual.price[row] for row in most})
        dual.set_prices(best)
        self._look()

    def _settle(self, row: int) -> bool:
        """Move one row's price to where assignments that overflow there cost as much as those that don't.

        Returns whether one of those that were cheapest around it overflows elsewhere.
        """
        tried: dict[float, float] = {}
        others, price = dict(self.dual.price), self.dual.price[row]
        low, high, elsewhere = 0.0, math.inf, {True: False, False: False}
        for _ in range(HALVINGS):
            self.dual.set_prices({**others, row: price})
            tried[price], alive = self._look()
            over = bool(alive[row] > self.limit)
            elsewhere[over] = int((alive > self.limit).sum()) > over
            low, high = (price, high) if over else (low, price)
            price = low * FARTHER if math.isinf(high) else math.sqrt(low * high) if low else high / FARTHER
        self.dual.set_prices({**others, row: max(tried, key=lambda one: tried[one])})
        self._look()
        return any(elsewhere.values())

    def _spare(self, little_s: float) -> None:
        """Do without prices that raise the bound by little: tables carry every time step that has one."""
        for row in sorted(self.dual.price, key=lambda one: (self.dual.price[one], one))[:-1]:
            price, bound_s = self.dual.price, self.bound_s
            self.dual.set_prices({one: by for one, by in price.items() if one != row})
            if self._look()[0] < bound_s - little_s:
                self.dual.set_prices(price)
                self._look()

    def _look(self) -> tuple[float, Ints]:
        """Let the messages settle at the prices: the bound, and the bytes alive of what is cheap there."""
        for _ in range(SWEEPS):
            chosen = self.dual.sweep()
        bound_s = self.bound_s
        self._cheapest.append((bound_s, chosen, self.dual.price))
        return bound_s, moves.alive_bytes(self.dual.flat, chosen)


def _look_at_the_clock(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise OutOfTime
