"""Sets that grow together."""

from __future__ import annotations


class Disjoint:
    """The numbers from 0 on, each in a set of its own until two are joined.

    A forest with path halving (Tarjan and van Leeuwen, "Worst-case Analysis of Set Union Algorithms", JACM 1984).
    """

    def __init__(self, size: int = 0) -> None:
        self._above = list(range(size))

    def add(self) -> int:
        """One more number, in a set of its own."""
        self._above.append(len(self._above))
        return self._above[-1]

    def find(self, number: int) -> int:
        """The number that stands for its set."""
        above = self._above
        while (one := above[number]) != number:
            above[number] = number = above[one]
        return number

    def join(self, a: int, b: int) -> None:
        """Make one set of two; what stood for that of `b` stands for both."""
        self._above[self.find(a)] = self.find(b)
