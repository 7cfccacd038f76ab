"""`jaxplan frontier`, `curve` and `min-devices`: step time against memory, and against the number of devices."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from .argument_types import counts, duration_s, output, ratio
from .progress import progress
from .step_arguments import add_memory, add_program, add_step, donated, leave_accelerators_alone, mesh_of


def add_frontier(commands: Any) -> None:
    """Adds the command to the parser's `commands`."""
    parser = commands.add_parser("frontier", help="all good trade-offs of a step's time and memory")
    add_step(parser, hardware_or_target=True, searched=False)
    parser.add_argument(
        "--eps", type=ratio, default=1e-3, metavar="PART", help="nearer plans are one; default: 0.001"
    )
    parser.add_argument(
        "--limit",
        type=duration_s,
        default=60.0,
        metavar="TIME",
        help="no search begins after it; default 60s",
    )
    parser.add_argument("--json", type=output, metavar="FILE", help="save the points")
    parser.add_argument("--svg", type=output, metavar="FILE", help="draw them")
    parser.set_defaults(command=_frontier)


def _frontier(arguments: argparse.Namespace) -> None:
    import jaxplan

    from .step_source import load_step

    leave_accelerators_alone()
    with progress(f"tracing the frontier of {arguments.step}"):
        source = load_step(arguments.step, arguments.args)
        found = jaxplan.frontier(
            source.step,
            mesh_of(arguments),
            *source.shapes,
            eps=arguments.eps,
            time_limit_s=arguments.limit,
            donate_argnums=donated(arguments, source),
            hardware=arguments.hardware,
        )
    _write(found, arguments)
    print(found)


def add_curve(commands: Any) -> None:
    """Adds the command to the parser's `commands`."""
    parser = commands.add_parser(
        "curve", help="the best step time for each number of devices, meshes searched"
    )
    _add_counted(parser, "numbers to plan for, as 1,2,4,8; default: powers of two up to 64")
    parser.add_argument("--json", type=output, metavar="FILE", help="save the points")
    parser.add_argument("--svg", type=output, metavar="FILE", help="draw them")
    parser.set_defaults(command=_curve)


def add_min_devices(commands: Any) -> None:
    """Adds the command to the parser's `commands`."""
    parser = commands.add_parser("min-devices", help="the fewest devices that a step fits, meshes searched")
    _add_counted(parser, "numbers to try, as 1,2,4,8; default: powers of two up to 1024")
    parser.add_argument("--json", type=output, metavar="FILE", help="plan it to the end and save the plan")
    parser.set_defaults(command=_min_devices)


def _add_counted(parser: argparse.ArgumentParser, numbers: str) -> None:
    add_program(parser)
    parser.add_argument("--hardware", required=True, metavar="NAME", help="one that `jaxplan hardware` lists")
    parser.add_argument("--devices", type=counts, metavar="N,...", help=numbers)
    parser.add_argument(
        "--mesh-axes", type=int, choices=(1, 2, 3), default=2, help="the most axes of a mesh; default: 2"
    )
    add_memory(parser)


def _curve(arguments: argparse.Namespace) -> None:
    import jaxplan

    with progress(f"drawing the curve of {arguments.step}"):
        found = _counted(jaxplan.curve, arguments)
    _write(found, arguments)
    print(found)


def _min_devices(arguments: argparse.Namespace) -> None:
    import jaxplan

    with progress(f"looking for the fewest devices for {arguments.step}"):
        found = _counted(jaxplan.min_devices, arguments)
        if arguments.json:
            found.plan.save(arguments.json)
            print(f"jaxplan: saved {arguments.json}", file=sys.stderr)
    print(found)
    for line in found.tried[1:]:
        print(f"  {line}")


def _counted(search: Callable[..., Any], arguments: argparse.Namespace) -> Any:
    from .step_source import load_step

    leave_accelerators_alone()
    source = load_step(arguments.step, arguments.args)
    settings = {} if arguments.devices is None else {"devices": arguments.devices}
    return search(
        source.step,
        *source.shapes,
        **settings,
        hardware=arguments.hardware,
        memory=arguments.memory,
        donate_argnums=donated(arguments, source),
        options={"mesh_axes": arguments.mesh_axes},
    )


def _write(found: Any, arguments: argparse.Namespace) -> None:
    # the files before the text: a reader of stdout that goes away takes none of them along
    if arguments.json:
        found.to_json(arguments.json)
        print(f"jaxplan: saved {arguments.json}", file=sys.stderr)
    if arguments.svg:
        found.plot(arguments.svg)
        print(f"jaxplan: drew {arguments.svg}", file=sys.stderr)
