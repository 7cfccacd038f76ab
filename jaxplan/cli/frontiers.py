"""`jaxplan frontier`: the plans that no other one beats in both step time and memory."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .argument_types import duration_s, output, ratio
from .progress import progress
from .step_arguments import add_step, leave_accelerators_alone, mesh_of


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
            donate_argnums=source.donate_argnums if arguments.donate is None else arguments.donate,
            hardware=arguments.hardware,
        )
    # the files first: a reader of stdout that goes away takes none of them along
    if arguments.json:
        found.to_json(arguments.json)
        print(f"jaxplan: saved {arguments.json}", file=sys.stderr)
    if arguments.svg:
        found.plot(arguments.svg)
        print(f"jaxplan: drew {arguments.svg}", file=sys.stderr)
    print(found)
