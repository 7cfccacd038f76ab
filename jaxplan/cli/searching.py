"""`jaxplan search` and `jaxplan compare`: other ways to search, and what they are worth beside the proof."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .argument_types import duration_s, output
from .progress import progress
from .step_arguments import add_step, donated, leave_accelerators_alone, mesh_of

#: What a search is given where nothing is said.
BUDGET_S = 30.0


def add_searching(commands: Any) -> None:
    """Adds both commands to the parser's `commands`."""
    search = commands.add_parser("search", help="plan a step by a named search, within a time")
    _add(search)
    search.add_argument(
        "--algo", required=True, metavar="NAME", help="ilp, ft, optcnn, dp, mcmc, lambda, random or templates"
    )
    search.add_argument("--json", type=output, metavar="FILE", help="save the plan")
    search.set_defaults(command=_search)

    compare = commands.add_parser("compare", help="several searches of one step beside the bound that is proved")
    _add(compare)
    compare.add_argument("--algos", type=_names, metavar="NAME,...", help="default: all that `search` takes")
    compare.set_defaults(command=_compare)


def _add(parser: argparse.ArgumentParser) -> None:
    add_step(parser, hardware_or_target=True, searched=False)
    parser.add_argument("--memory", metavar="SIZE", help="budget a device, as 14GiB; default: the profile's")
    parser.add_argument(
        "--budget", type=duration_s, default=BUDGET_S, metavar="TIME", help="of each search; default: 30s"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random choices; default: 0")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _search(arguments: argparse.Namespace) -> None:
    import jaxplan

    from .step_source import load_step

    leave_accelerators_alone()
    with progress(f"searching {arguments.step} by {arguments.algo}"):
        source = load_step(arguments.step, arguments.args)
        plan = jaxplan.plan(
            source.step,
            mesh_of(arguments),
            *source.shapes,
            donate_argnums=donated(arguments, source),
            hardware=arguments.hardware,
            memory_budget=arguments.memory,
            options=jaxplan.Options(search=arguments.algo, time_limit_s=arguments.budget, seed=arguments.seed),
        )
    if arguments.json:
        plan.save(arguments.json)
        print(f"jaxplan: saved {arguments.json}", file=sys.stderr)
    print(plan)


def _compare(arguments: argparse.Namespace) -> None:
    import jaxplan

    from .step_source import load_step

    leave_accelerators_alone()
    with progress(f"comparing searches of {arguments.step}"):
        source = load_step(arguments.step, arguments.args)
        comparison = jaxplan.compare(
            source.step,
            mesh_of(arguments),
            *source.shapes,
            **({} if arguments.algos is None else {"searches": arguments.algos}),
            limit_s=arguments.budget,
            donate_argnums=donated(arguments, source),
            hardware=arguments.hardware,
            memory_budget=arguments.memory,
            options=jaxplan.Options(seed=arguments.seed),
        )
    print(comparison)
