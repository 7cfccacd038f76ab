"""Sums over dimensions of extent 1 that were only just added: none of it.

jax makes the gradient of what was broadcast, a bias or a norm's scale, in three steps: `reduce_sum` over what was
added, `reshape` to the rank of what it was broadcast for, `reduce_sum` over the dimensions of extent 1.  XLA drops the
last two before it moves any sum.  So they are dropped here: what a device has summed of a bias that all layers add is
then added to that of the other layers, and summed over devices once.  (The relative bias of four layers' attention on
eight H100, f32[16, 384, 384]: one reduce_scatter, where one a layer was planned; jax 0.10.2.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .._jax import Literal


def without_unit_sums(equations: list[Any], results: Sequence[Any]) -> list[Any]:
    """Equations without the two that reshape a result and sum it back to its shape, where nothing else reads it."""
    reads = Counter(v for eqn in equations for v in eqn.invars if not isinstance(v, Literal))
    reads.update(v for v in results if not isinstance(v, Literal))
    made = {eqn.outvars[0]: i for i, eqn in enumerate(equations) if len(eqn.outvars) == 1}
    found: list[Any] = list(equations)
    for i, eqn in enumerate(equations):
        if eqn.primitive.name != "reduce_sum" or isinstance(eqn.invars[0], Literal) or not _over_units(eqn):
            continue
        spread = made.get(eqn.invars[0])
        if spread is None or reads[eqn.invars[0]] != 1:
            continue
        reshape = found[spread]
        if reshape.primitive.name != "reshape" or reshape.params.get("sharding") is not None:
            continue
        value = reshape.invars[0]
        maker = None if isinstance(value, Literal) or value not in made else found[made[value]]
        if maker is not None and reads[value] == 1 and value.aval.shape == eqn.outvars[0].aval.shape:
            found[made[value]] = maker.replace(outvars=eqn.outvars)
            found[spread] = found[i] = None
            made[eqn.outvars[0]] = made[value]
    return [eqn for eqn in found if eqn is not None]


def _over_units(eqn: Any) -> bool:
    shape = eqn.invars[0].aval.shape
    return eqn.params.get("out_sharding") is None and all(shape[axis] == 1 for axis in eqn.params["axes"])
