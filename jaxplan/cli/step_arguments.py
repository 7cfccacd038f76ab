"""The arguments that name a step and where it runs, shared by the commands that plan one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..errors import MeshError
from .argument_types import mesh_axes, mesh_axes_or_auto, positions

if TYPE_CHECKING:
    from .step_source import StepSource


def add_step(
    parser: argparse.ArgumentParser,
    *,
    hardware_or_target: bool,
    searched: bool = True,
    any_mesh: bool = False,
) -> None:
    """The arguments that name a step, where it is to run and, where one plan is `searched` for, how.

    Args:
      any_mesh: `--mesh auto` and `--devices` are allowed too.
    """
    add_program(parser)
    if any_mesh:
        mesh = parser.add_mutually_exclusive_group(required=True)
        mesh.add_argument(
            "--mesh",
            type=mesh_axes_or_auto,
            metavar="AXIS=SIZE,...",
            help="data=4,model=2; or auto, with --target",
        )
        mesh.add_argument("--devices", type=int, metavar="N", help="so many of --hardware, on the best mesh")
    else:
        parser.add_argument(
            "--mesh", type=mesh_axes, required=True, metavar="AXIS=SIZE,...", help="data=4,model=2"
        )
    _add_place(parser, hardware_or_target)
    if searched:
        add_memory(parser)
        parser.add_argument("--search", metavar="NAME", help="ilp (the default) or a template such as fsdp")
        parser.add_argument(
            "--annotations",
            choices=("pin", "start", "ignore"),
            help="shardings that the program brings along: honoured (the default), begun with, or left out",
        )


def add_program(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a step."""
    parser.add_argument(
        "step",
        metavar="MODULE:FUNCTION",
        help="a function of no arguments that returns (step, shapes); or a step, with --args; "
        "or module:config of a module with CONFIGS and make_train_step, such as models.gpt:tiny",
    )
    parser.add_argument("--args", metavar="MODULE:FUNCTION", help="returns the tuple of the step's arguments")
    parser.add_argument(
        "--donate",
        type=positions,
        metavar="N,...",
        help='positions of donated arguments; default: "", and 0 (the state) for module:config',
    )


def add_memory(parser: argparse.ArgumentParser) -> None:
    """The argument that limits a plan's memory."""
    parser.add_argument("--memory", metavar="SIZE", help="budget a device, as 14GiB; default: the profile's")


def _add_place(parser: argparse.ArgumentParser, hardware_or_target: bool) -> None:
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


def options_of(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The planner's options that were given; None where none was."""
    given = {name: getattr(arguments, name, None) for name in ("search", "annotations", "refine")}
    return {name: value for name, value in given.items() if value is not None} or None


def leave_accelerators_alone() -> None:
    """Planning and compiling need no accelerator: none is taken, nor its memory, from whoever is using it."""
    import jax

    if not jax.config.jax_platforms:  # type: ignore[attr-defined]  # a setting, made when jax is imported
        jax.config.update("jax_platforms", "cpu")


def mesh_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `jaxplan.plan` is told of `--mesh`, `--devices`, `--target` and `--hardware`.

    Raises:
      MeshError: they don't say which devices.
    """
    import jaxplan

    settings: dict[str, Any] = {"hardware": arguments.hardware}
    if isinstance(arguments.mesh, dict):
        return {"mesh": mesh_of(arguments), **settings}
    if arguments.target is not None:
        target = jaxplan.target(arguments.target)
        if arguments.devices not in (None, len(target.devices)):
            raise MeshError(
                f"--devices {arguments.devices}, and target {arguments.target} has {len(target.devices)}: leave one out"
            )
        return {"mesh": "auto", "devices": target, **settings}
    if arguments.devices is None:
        raise MeshError("--mesh auto says no number of devices: use --devices N, or name them with --target")
    return {"mesh": "auto", "devices": arguments.devices, **settings}


def mesh_of(arguments: argparse.Namespace) -> Any:
    """The mesh of `--mesh` over the devices of `--target`, or over none."""
    import jax

    import jaxplan

    if arguments.target is None:
        return jax.sharding.AbstractMesh(tuple(arguments.mesh.values()), tuple(arguments.mesh))
    return jaxplan.target(arguments.target).mesh(**arguments.mesh)


def donated(arguments: argparse.Namespace, source: StepSource) -> tuple[int, ...]:
    """The positions that `--donate` names; without it those that the step says."""
    named: tuple[int, ...] | None = arguments.donate
    return source.donate_argnums if named is None else named
