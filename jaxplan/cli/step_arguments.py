"""The arguments that name a step and where it runs, shared by the commands that plan one."""

from __future__ import annotations

import argparse
from typing import Any

from .argument_types import mesh_axes, positions


def add_step(parser: argparse.ArgumentParser, *, hardware_or_target: bool, searched: bool = True) -> None:
    """The arguments that name a step, where it is to run and, where one plan is `searched` for, how."""
    parser.add_argument(
        "step",
        metavar="MODULE:FUNCTION",
        help="a function of no arguments that returns (step, shapes); or a step, with --args; "
        "or module:config of a module with CONFIGS and make_train_step, such as models.gpt:tiny",
    )
    parser.add_argument("--args", metavar="MODULE:FUNCTION", help="returns the tuple of the step's arguments")
    parser.add_argument(
        "--mesh", type=mesh_axes, required=True, metavar="AXIS=SIZE,...", help="data=4,model=2"
    )
    where = parser.add_mutually_exclusive_group(required=hardware_or_target)
    if hardware_or_target:
        where.add_argument("--hardware", metavar="NAME", help="one that `jaxplan hardware` lists")
    where.add_argument(
        "--target",
        metavar="NAME:DIMS",
        help="devices to compile for: tpu-v5e:2x4 (chips), h100:1x1x8 (slices x hosts x devices)"
        + (
            ""
            if hardware_or_target
            else "; default: this machine's own, forced host devices where it has too few"
        ),
    )
    if searched:
        parser.add_argument(
            "--memory", metavar="SIZE", help="budget a device, as 14GiB; default: the profile's"
        )
        parser.add_argument("--search", metavar="NAME", help="ilp (the default) or a template such as fsdp")
    parser.add_argument(
        "--donate",
        type=positions,
        metavar="N,...",
        help='positions of donated arguments; default: "", and 0 (the state) for module:config',
    )


def leave_accelerators_alone() -> None:
    """Planning and compiling need no accelerator: none is taken, nor its memory, from whoever is using it."""
    import jax

    if not jax.config.jax_platforms:  # type: ignore[attr-defined]  # a setting, made when jax is imported
        jax.config.update("jax_platforms", "cpu")


def mesh_of(arguments: argparse.Namespace) -> Any:
    """The mesh of `--mesh` over the devices of `--target`, or over none."""
    import jax

    import jaxplan

    if arguments.target is None:
        return jax.sharding.AbstractMesh(tuple(arguments.mesh.values()), tuple(arguments.mesh))
    return jaxplan.target(arguments.target).mesh(**arguments.mesh)
