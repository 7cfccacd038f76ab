"""FlexFlow's six networks on its two clusters, searched in six ways; see README.md beside this."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from jaxplan.api import auto_shard, simulated_choices
from jaxplan.cost import CostModel, collective_wire_bytes
from jaxplan.inspection import compare_on
from jaxplan.search import SEARCHES as ALGORITHMS
from jaxplan.search import SearchResult, Space, evaluate
from jaxplan.search.simulated_walk import walk_simulated
from jaxplan.sharding import reshard_steps
from jaxplan.simulator import StrategySimulator
from models import get, get_config

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"

NETS: dict[str, tuple[str, str, int]] = {
    "AlexNet": ("alexnet", "alexnet", 256),
    "Inception-v3": ("inception", "inception-v3", 64),
    "ResNet-101": ("resnet", "resnet101", 64),
    "RNNTC": ("lstm", "rnntc", 64),
    "RNNLM": ("lstm", "rnnlm", 64),
    "NMT": ("nmt", "flexflow", 64),
}
"""Name -> model, config, samples on each device: the paper's 256 for AlexNet and 64 for the others."""

CLUSTERS: dict[str, tuple[str, dict[str, int]]] = {
    "16 P100": ("p100", {"node": 4, "gpu": 4}),
    "64 K80": ("k80", {"node": 16, "gpu": 4}),
}
"""Name -> profile and mesh: four devices a node; both profiles name the paper's evaluation as their source."""

SEARCHES = ("ilp", "ft", "optcnn", "mcmc", "templates")

CHANGES, LOOKS, FULL_LOOKS = 10_000, 500, 25
"""Random changes of a strategy; so many of them are compared with a full run, and so many with one of every device."""

LARGE, FEWER = 4_000, 10
"""From so many operations on, so many times fewer of each: a full run of every device takes seconds."""


def built(net: str, cluster: str, share: int) -> tuple[Any, Any, Space, dict[str, float]]:
    """The pipeline, its pins and its space with so many samples a device, and the seconds of making them."""
    model, name, _ = NETS[net]
    profile, axes = CLUSTERS[cluster]
    devices = int(np.prod(list(axes.values())))
    config = dataclasses.replace(get_config(model, name), batch_size=share * devices, dtype="float32")
    module = get(model)
    state = jax.eval_shape(lambda key: module.init_state(config, key), jax.random.key(0))
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    step = auto_shard(module.make_train_step(config), mesh, hardware=profile, donate_argnums=0)
    began, used = time.perf_counter(), time.process_time()
    pipeline, pins = step.pipeline((state, module.batch_shapes(config)), {})
    space = pipeline.space(pins)
    clock = {"wall_s": time.perf_counter() - began, "processor_s": time.process_time() - used}
    return pipeline, pins, space, clock


def sent_bytes(space: Space, model: CostModel, assignment: Sequence[int]) -> float:
    """What one device sends in a step under an assignment."""
    sizes, total = dict(model.axes), 0.0
    for edge, moved in zip(space.problem.edges, space.passages, strict=True):
        rows = moved.tails[assignment[edge.tail]], moved.heads[assignment[edge.head]]
        for one in reshard_steps(*rows, moved.tensor.bytes, model.axes):
            sent = collective_wire_bytes(one.kind, one.bytes, [sizes[axis] for axis in one.axes])
            total += float(sent) * moved.trips
    return total


def searched(net: str, cluster: str, limit_s: float, seed: int) -> dict[str, Any]:
    """Every search on one network and cluster: what it found when, simulated too."""
    share = NETS[net][2]
    while True:
        pipeline, pins, space, clock = built(net, cluster, share)
        if ALGORITHMS["ilp"](space.problem, time_limit_s=limit_s).assignment:
            break
        share //= 2  # nothing fits
    began, used = time.perf_counter(), time.process_time()
    given = pipeline.given(pins)
    templates = {"wall_s": time.perf_counter() - began, "processor_s": time.process_time() - used}
    found, processor = {}, {}
    for name in SEARCHES:
        used = time.process_time()
        found |= compare_on(space.problem, given, (name,), limit_s=limit_s, seed=seed, relative_gap=1e-4)
        processor[name] = time.process_time() - used
    choices = simulated_choices(space, pipeline.model)
    # where no template fits, the walk begins where the exact search ended
    start = found["templates"].assignment or found["ilp"].assignment
    used = time.process_time()
    walk = walk_simulated(
        space.problem, StrategySimulator(choices, start), time_limit_s=limit_s, seed=seed, hint=start
    )
    found["mcmc simulated"], processor["mcmc simulated"] = walk.result, time.process_time() - used
    bound_s = max(result.bound_s for result in found.values())

    def row(name: str, result: SearchResult) -> dict[str, Any] | None:
        if not result.assignment:
            return None
        return {
            "objective_s": result.objective_s, "gap": result.objective_s / bound_s - 1, "best_at_s": result.best_at_s,
            "wall_s": result.wall_s, "processor_s": processor[name], "peak_bytes": result.peak_bytes,
            "sent_bytes": sent_bytes(space, pipeline.model, result.assignment), "ended": result.termination.value,
            "simulated_s": StrategySimulator(choices, result.assignment).step_s,
            "history": [
                [round(wall_s, 4), objective_s] for wall_s, objective_s, _ in result.history if np.isfinite(objective_s)
            ],
        }  # fmt: skip

    rows = {name: row(name, result) for name, result in found.items()}
    rows["mcmc simulated"] |= {
        "best_at_s": walk.history[-1][0], "proposals": walk.proposals, "simulated_history": walk.history,
    }  # fmt: skip
    return {
        "samples_a_device": share,
        "nodes": len(space.problem.nodes), "edges": len(space.problem.edges), "bound_s": bound_s, "built": clock,
        "templates": {
            **templates,
            "objective_s": {name: evaluate(space.problem, chosen).objective_s for name, chosen in given.items()},
            "sent_bytes": {name: sent_bytes(space, pipeline.model, chosen) for name, chosen in given.items()},
        },
        "searches": rows, "delta": delta(StrategySimulator(choices, start), space, seed),
    }  # fmt: skip


def remeasured(net: str, cluster: str, seed: int) -> dict[str, Any]:
    """The changes alone, from the first template that fits."""
    pipeline, pins, space, _ = built(net, cluster, NETS[net][2])
    start = next(iter(pipeline.given(pins).values()), (0,) * len(space.problem.nodes))
    return delta(StrategySimulator(simulated_choices(space, pipeline.model), start), space, seed)


def delta(simulator: StrategySimulator, space: Space, seed: int) -> dict[str, Any]:
    """Random changes of one strategy: how long each takes beside full runs, and that none differs from them."""
    rng = np.random.default_rng(seed)
    sizes = [node.costs_s.size for node in space.problem.nodes]
    movable = [n for n, size in enumerate(sizes) if size > 1]
    delta_s, every_s, class_s, compared = [], [], [], 0
    changes, looks, full_looks = (
        count // (FEWER if len(sizes) >= LARGE else 1) for count in (CHANGES, LOOKS, FULL_LOOKS)
    )
    simulator.full()
    for number in range(changes):
        node = movable[int(rng.integers(len(movable)))]
        strategy = int(rng.integers(sizes[node]))
        began = time.perf_counter()
        change = simulator.delta(node, strategy)
        delta_s.append(time.perf_counter() - began)
        if number % (changes // looks) == 0:
            began = time.perf_counter()
            by_class = simulator.full(every_device=False)
            class_s.append(time.perf_counter() - began)
            assert by_class.step_s == change.step_s
            compared += 1
        if number % (changes // full_looks) == 0:
            began = time.perf_counter()
            every = simulator.full()
            every_s.append(time.perf_counter() - began)
            assert every.step_s == change.step_s
        # the walk takes some of what it is offered
        if rng.random() < 0.3:
            simulator.commit()
        else:
            simulator.rollback()
    one, every = simulator.schedule(), simulator.full()
    for field in dataclasses.fields(one):
        assert (getattr(one, field.name) == getattr(every, field.name)).all(), field.name
    return {
        "changes": changes, "compared": compared, "delta_s": statistics.median(delta_s),
        "delta_mean_s": statistics.mean(delta_s), "full_every_device_s": statistics.median(every_s),
        "full_one_device_s": statistics.median(class_s),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(NETS), metavar="NET")
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS), metavar="CLUSTER")
    parser.add_argument("--limit", type=float, default=10.0, metavar="SECONDS", help="of each search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", nargs=2, metavar=("NET", "CLUSTER"), help=argparse.SUPPRESS)
    parser.add_argument("--delta", action="store_true", help="measure the changes of what is there anew")
    arguments = parser.parse_args()
    if arguments.case and arguments.delta:
        print(json.dumps(remeasured(*arguments.case, arguments.seed)))
        return
    if arguments.case:
        print(json.dumps(searched(*arguments.case, arguments.limit, arguments.seed)))
        return
    for cluster in arguments.clusters:
        for net in arguments.only:
            command = [sys.executable, __file__, "--case", net, cluster]
            command += ["--limit", str(arguments.limit), "--seed", str(arguments.seed)]
            results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            if arguments.delta and f"{net} on {cluster}" not in results:
                continue
            command += ["--delta"] if arguments.delta else []
            # a process of its own: nothing is warm
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{net} on {cluster}: {done.stderr[-1500:]}", file=sys.stderr)
                continue
            results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            found = json.loads(done.stdout.splitlines()[-1])
            if arguments.delta:
                results[f"{net} on {cluster}"]["delta"] = found
            else:
                results[f"{net} on {cluster}"] = {**found, "limit_s": arguments.limit, "seed": arguments.seed}
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            print(f"{net} on {cluster}: done", flush=True)


if __name__ == "__main__":
    main()
