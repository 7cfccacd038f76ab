"""Does what is promised to fit, fit?  The largest batch whose plan fits a device is compiled for it, whole.

    python experiments/quality/filled.py MODEL:CONFIG ... [--target tpu-v5e:2x4] [--mesh data=4,model=2]

XLA for TPU leaves gaps between buffers where memory is plenty, and fewer where it is not: a plan of a third of the
memory says little of one that needs all of it.  Rows go into `filled.jsonl` as they come.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import math
from pathlib import Path
from typing import Any

import jax

import jaxplan
from jaxplan.lowering import compiled_memory

RESULTS = Path(__file__).parent / "filled.jsonl"
NEAR = 1 / 32
"""The batch is the largest that fits to within so much."""


class Filled:
    """A published model on a mesh, with any batch."""

    def __init__(self, name: str, target: str, axes: dict[str, int]) -> None:
        module, _, config = name.partition(":")
        self._module: Any = importlib.import_module(f"models.{module}")
        self._config = self._module.CONFIGS[config]
        self._mesh, self._hardware = jaxplan.target(target).mesh(**axes), target.partition(":")[0]
        self._unit = math.prod(axes.values())

    def planned(self, batch: int) -> tuple[Any, Any, jaxplan.Plan] | None:
        """The step, its arguments and its plan; None where nothing fits."""
        config = dataclasses.replace(self._config, batch_size=batch)
        state = jax.eval_shape(lambda: self._module.init_state(config, jax.random.key(0)))
        shapes = state, self._module.batch_shapes(config)
        options = jaxplan.Options(compare_templates=False)
        step = jaxplan.auto_shard(
            self._module.make_train_step(config), self._mesh, donate_argnums=0, hardware=self._hardware, options=options
        )
        try:
            return step, shapes, step.plan(*shapes)
        except jaxplan.InfeasibleError:
            return None

    def largest(self) -> tuple[int, Any, Any, jaxplan.Plan]:
        """The largest batch that fits, to within `NEAR`, and its plan."""
        fits, best = self._config.batch_size, self.planned(self._config.batch_size)
        if best is None:
            raise SystemExit(f"{self._config} does not fit as published")
        over = 0
        while not over or over - fits > max(self._unit, NEAR * fits):
            share = best[2].cost.peak_bytes / best[2].budget_bytes
            guess = (fits + over) // 2 if over else int(fits * min(2.0, max(1.05, 1 / share)))
            batch = max(fits // self._unit + 1, guess // self._unit) * self._unit
            print(f"  batch {batch} (of {fits}: {share:.0%} of the memory)", flush=True)
            found = self.planned(batch)
            if found is None:
                over = batch
            else:
                fits, best = batch, found
        return (fits, *best)


def row_of(name: str, target: str, axes: dict[str, int]) -> dict[str, Any]:
    """What was promised and what the compiler made of it."""
    batch, step, shapes, plan = Filled(name, target, axes).largest()
    row = {
        "model": name, "target": target, "mesh": "x".join(map(str, axes.values())), "batch": batch,
        "date": datetime.date.today().isoformat(), "jax": jax.__version__, "budget_bytes": plan.budget_bytes,
        "predicted_bytes": plan.cost.peak_bytes,
    }  # fmt: skip
    options: dict[str, Any] = dict(jaxplan.target(target).compiler_options)
    try:
        compiled = step.lower(*shapes).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as refused:
        return {**row, "refused": str(refused).splitlines()[0]}
    return {**row, "compiled_bytes": compiled_memory(compiled).peak_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL:CONFIG")
    parser.add_argument("--target", default="tpu-v5e:2x4")
    parser.add_argument("--mesh", default="data=4,model=2")
    given = parser.parse_args()
    axes = {name: int(size) for name, size in (part.split("=") for part in given.mesh.split(","))}
    for name in given.models:
        print(f"{name} on {given.target}", flush=True)
        row = row_of(name, given.target, axes)
        with RESULTS.open("a") as rows:
            rows.write(json.dumps(row) + "\n")
        print(f"  {row}", flush=True)


if __name__ == "__main__":
    main()
