"""Compiled pieces of variable elimination: sums of tables minimised, sets as bits, random numbers."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .problem import Floats, Ints


@njit(cache=True, nogil=True)
def random(state: NDArray[np.uint64]) -> np.uint64:
    """53 random bits; xorshift64: Marsaglia, "Xorshift RNGs", 2003."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return x >> np.uint64(11)


@njit(cache=True, nogil=True)
def members(bits: NDArray[np.uint64], out: Ints) -> int:
    """The positions of the bits that are set, ascending; how many."""
    count = 0
    for w in range(bits.size):
        x = bits[w]
        b = w * 64
        while x:
            if x & np.uint64(1):
                out[count] = b
                count += 1
            x >>= np.uint64(1)
            b += 1
    return count


@njit(cache=True, nogil=True)
def minimise(
    pool_s: Floats,
    shift: Floats,
    base: Ints,
    step: Ints,
    shape: Ints,
    out: int,
    marginal: Floats,
    to_marginal: bool,
) -> None:
    """Over all entries of `shape`, the sum of functions at `base`, `step[function, dimension]` apart, minimised.

    Over the last dimension of `step`, that of the node, into `pool_s[out:]`; or, `to_marginal`, over all others.
    """
    functions, dims, own = base.size, shape.size, shift.size
    index = np.zeros(dims, np.int64)
    buffer = np.empty(own)
    entries = 1
    for c in range(dims):
        entries *= shape[c]
    for t in range(entries):
        for s in range(own):
            buffer[s] = shift[s]
        for g in range(functions):
            b, st = base[g], step[g, dims]
            if st == 1:
                for s in range(own):
                    buffer[s] += pool_s[b + s]
            else:
                for s in range(own):
                    buffer[s] += pool_s[b + s * st]
        if to_marginal:
            for s in range(own):
                marginal[s] = min(marginal[s], buffer[s])
        else:
            least = buffer[0]
            for s in range(1, own):
                least = min(least, buffer[s])
            pool_s[out + t] = least
        for c in range(dims - 1, -1, -1):
            index[c] += 1
            for g in range(functions):
                base[g] += step[g, c]
            if index[c] < shape[c]:
                break
            for g in range(functions):
                base[g] -= step[g, c] * shape[c]
            index[c] = 0
