"""The commands of `jaxplan`.  What was asked for goes to stdout; progress, messages and errors go to stderr.

Exit codes: 0 done; 1 an error in the user's own code, with its traceback; 2 wrong arguments, an unreadable
file or any other `JaxplanError`; 3 what was compiled is not what was planned, or XLA compiles no program of it; 130
interrupted; 141 the reader of stdout went away.

jax, the planner and the models are imported by the command that needs them, so that the others don't wait.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ArgumentError, CompilerError, JaxplanError, MeshError
from .argument_types import output
from .frontiers import add_curve, add_frontier, add_min_devices
from .progress import progress
from .searching import add_searching
from .solving import add_solve
from .step_arguments import add_step, donated, leave_accelerators_alone, mesh_of, mesh_settings, options_of

#: The unit of cost of an exported problem: the contest's costs are integers.
PICOSECOND_S = 1e-12

EXIT_DONE = 0
EXIT_ERROR = 2
EXIT_NOT_AS_PLANNED = 3
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_READER_GONE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; argparse's `SystemExit` for `--help` and wrong usage."""
    arguments = command_parser().parse_args(argv)
    arguments.is_process = argv is None
    try:
        code = arguments.command(arguments) or EXIT_DONE
        sys.stdout.flush()
    except KeyboardInterrupt:
        _say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more when it exits, and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_READER_GONE
    except (JaxplanError, OSError) as error:
        _say(f"{type(error).__name__}: {error}")
        return EXIT_NOT_AS_PLANNED if isinstance(error, CompilerError) else EXIT_ERROR
    return code


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxplan",
        description="Plan how to shard a JAX train step over a device mesh. No device is needed.",
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser("plan", help="plan a step and print the plan")
    add_step(plan, hardware_or_target=True, any_mesh=True)
    plan.add_argument(
        "--refine", type=int, metavar="N", help="compile the N best plans for --target; keep the fastest that fits so"
    )
    plan.add_argument("--json", type=output, metavar="FILE", help="save the plan")
    plan.add_argument("--html", type=output, metavar="FILE", help="write the plan as a page")
    plan.add_argument("--python", type=output, metavar="FILE", help="write the plan as Python")
    plan.add_argument(
        "--fewest", action="store_true", help="into --python: of what is pinned inside the step what matters alone"
    )
    plan.set_defaults(command=_plan)

    verify = commands.add_parser("verify", help="compile a step and lay what was compiled beside its plan")
    add_step(verify, hardware_or_target=False)
    verify.add_argument(
        "--plan", type=Path, metavar="PLAN.json", help="hold it against this plan; default: plan now"
    )
    verify.add_argument("--numerics", action="store_true", help="also run one step sharded and unsharded")
    verify.set_defaults(command=_verify)

    audit = commands.add_parser("audit", help="price shardings of your own, or a template, beside the plan")
    add_step(audit, hardware_or_target=True)
    theirs = audit.add_mutually_exclusive_group(required=True)
    theirs.add_argument("--template", metavar="NAME", help="a hand-written plan such as fsdp")
    theirs.add_argument(
        "--shardings",
        metavar="MODULE:FUNCTION",
        help="a function of no arguments that returns (in_shardings, out_shardings), PartitionSpecs in the trees that "
        "jax.jit takes",
    )
    audit.add_argument("--compile", action="store_true", help="compile both too; needs --target")
    audit.set_defaults(command=_audit)

    explain = commands.add_parser("explain", help="why a tensor has its spec, and what others would cost")
    explain.add_argument("plan", type=Path, metavar="PLAN.json")
    explain.add_argument("path", metavar="PATH", help="a tree path that the plan prints")
    explain.set_defaults(command=_explain)

    diff = commands.add_parser("diff", help="what differs between two plans")
    diff.add_argument("before", type=Path, metavar="A.json")
    diff.add_argument("after", type=Path, metavar="B.json")
    diff.set_defaults(command=_diff)

    simulate = commands.add_parser(
        "simulate", help="the timeline of a saved plan: what runs when, and what waits"
    )
    simulate.add_argument("plan", type=Path, metavar="PLAN.json")
    simulate.add_argument("--svg", type=output, metavar="FILE", help="draw it")
    simulate.add_argument("--trace", type=output, metavar="FILE", help="write it for ui.perfetto.dev")
    simulate.set_defaults(command=_simulate)

    add_frontier(commands)
    add_curve(commands)
    add_min_devices(commands)
    add_searching(commands)
    add_solve(commands)

    export = commands.add_parser(
        "export-problem", help="write what the search is given for a step, for `solve`"
    )
    add_step(export, hardware_or_target=True)
    export.add_argument(
        "--json", type=output, metavar="FILE", required=True, help="to write: .json or .json.gz"
    )
    export.set_defaults(command=_export_problem)

    hardware = commands.add_parser("hardware", help="the hardware profiles, or one with its sources")
    hardware.add_argument("name", nargs="?", metavar="NAME", help="a profile, or the path of a .toml file")
    hardware.set_defaults(command=_hardware)

    calibrate = commands.add_parser("calibrate", help="measure this machine and write its hardware profile")
    calibrate.add_argument(
        "profile", type=output, metavar="FILE.toml", help="goes on where an earlier call stopped"
    )
    calibrate.add_argument("--like", metavar="NAME", help="the profile that fills in what can't be measured")
    calibrate.add_argument(
        "--host-devices",
        type=int,
        metavar="N",
        help="measure N forced host devices instead of an accelerator",
    )
    calibrate.set_defaults(command=_calibrate)

    models = commands.add_parser("models", help="what `plan` can plan of the package `models` found here")
    models.set_defaults(command=_models)
    return parser


class _ShowVersion(argparse.Action):
    """Reads the version when it is asked for: jaxplan also runs from a checkout that isn't installed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        try:
            version = importlib.metadata.version("jaxplan")
        except importlib.metadata.PackageNotFoundError:
            version = "of a checkout that is not installed"
        parser.exit(message=f"jaxplan {version}\n")


def _plan(arguments: argparse.Namespace) -> None:
    import jaxplan

    from .step_source import load_step

    if arguments.fewest and not arguments.python:
        raise ArgumentError("--fewest says what is written into --python FILE: name that file too")
    leave_accelerators_alone()
    with progress(f"planning {arguments.step}"):
        source = load_step(arguments.step, arguments.args)
        settings = mesh_settings(arguments)
        plan = jaxplan.plan(
            source.step,
            settings.pop("mesh"),
            *source.shapes,
            **settings,
            donate_argnums=donated(arguments, source),
            memory_budget=arguments.memory,
            options=options_of(arguments),
        )
    print(plan)
    if arguments.json:
        plan.save(arguments.json)
        _say(f"saved {arguments.json}")
    if arguments.html:
        plan.to_html(arguments.html)
        _say(f"wrote {arguments.html}")
    if arguments.python:
        exported: Any = plan
        if arguments.fewest:
            with progress(f"leaving out what {arguments.step} does as well without"):
                exported = jaxplan.export(
                    plan,
                    source.step,
                    *source.shapes,
                    donate_argnums=donated(arguments, source),
                    hardware=arguments.hardware,
                    options=options_of(arguments),
                )
            print(f"\n{exported}")
        arguments.python.write_text(exported.to_python(), encoding="utf-8")
        _say(f"wrote {arguments.python}")


def _export_problem(arguments: argparse.Namespace) -> None:
    import jaxplan

    from ..search import write_contest
    from .step_source import load_step

    if arguments.search is not None:
        raise ArgumentError(
            "export-problem writes the whole problem: a template of --search would not be in it"
        )
    leave_accelerators_alone()
    with progress(f"pricing {arguments.step}"):
        source = load_step(arguments.step, arguments.args)
        step = jaxplan.auto_shard(
            source.step, mesh_of(arguments), hardware=arguments.hardware, memory_budget=arguments.memory,
            donate_argnums=donated(arguments, source),
        )  # fmt: skip
        problem = step.problem(*source.shapes)
    write_contest(problem, arguments.json, PICOSECOND_S)
    _say(
        f"wrote {arguments.json}: {len(problem.nodes)} nodes, {len(problem.edges)} edges; costs in picoseconds, "
        "usage in bytes"
    )


def _verify(arguments: argparse.Namespace) -> int:
    import jaxplan

    from .step_source import load_step

    mesh = _mesh_of_devices(arguments)
    options = options_of(arguments) or {}
    if arguments.plan is not None:
        options["plan"] = jaxplan.load_plan(arguments.plan)
    with progress(f"verifying {arguments.step}"):
        source = load_step(arguments.step, arguments.args)
        step = jaxplan.auto_shard(
            source.step,
            mesh,
            donate_argnums=donated(arguments, source),
            memory_budget=arguments.memory,
            options=options,
        )
        verification = jaxplan.verify(step, *source.shapes, numerics=arguments.numerics)
    print(verification)
    return EXIT_DONE if verification.ok else EXIT_NOT_AS_PLANNED


def _audit(arguments: argparse.Namespace) -> None:
    import jaxplan

    from .step_source import load_shardings, load_step

    leave_accelerators_alone()
    with progress(f"auditing {arguments.step}"):
        source = load_step(arguments.step, arguments.args)
        if arguments.shardings is None:
            subject = {"template": arguments.template}
        else:
            subject = dict(
                zip(("in_shardings", "out_shardings"), load_shardings(arguments.shardings), strict=True)
            )
        audit = jaxplan.audit(
            source.step,
            mesh_of(arguments),
            *source.shapes,
            **subject,
            donate_argnums=donated(arguments, source),
            hardware=arguments.hardware,
            memory_budget=arguments.memory,
            options=options_of(arguments),
            compile=arguments.compile,
        )
    print(audit)


def _mesh_of_devices(arguments: argparse.Namespace) -> Any:
    """The mesh of `--mesh` over the devices of `--target`, or over this machine's."""
    import math

    import jax

    if arguments.target is not None:
        leave_accelerators_alone()
        return mesh_of(arguments)
    sizes, names = tuple(arguments.mesh.values()), tuple(arguments.mesh)
    if jax.config.jax_platforms == "cpu" and "device_count" not in os.environ.get("XLA_FLAGS", ""):  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", math.prod(sizes))
    if math.prod(sizes) > len(jax.devices()):
        raise MeshError(
            f"--mesh has {math.prod(sizes)} devices and this machine {len(jax.devices())} "
            f"({jax.devices()[0].device_kind}): name a --target to compile for, or set JAX_PLATFORMS=cpu for forced "
            "host devices"
        )
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, names, axis_types=types, devices=jax.devices()[: math.prod(sizes)])


def _explain(arguments: argparse.Namespace) -> None:
    import jaxplan

    print(jaxplan.load_plan(arguments.plan).explain(arguments.path))


def _diff(arguments: argparse.Namespace) -> None:
    import jaxplan

    print(jaxplan.load_plan(arguments.before).diff(jaxplan.load_plan(arguments.after)))


def _simulate(arguments: argparse.Namespace) -> None:
    import jaxplan

    timeline = jaxplan.simulate(jaxplan.load_plan(arguments.plan))
    # the files first: a reader of stdout that goes away takes none of them along
    if arguments.svg:
        timeline.to_svg(arguments.svg)
        _say(f"drew {arguments.svg}")
    if arguments.trace:
        timeline.to_trace(arguments.trace)
        _say(f"wrote {arguments.trace}")
    print(timeline)


def _hardware(arguments: argparse.Namespace) -> None:
    from ..hardware import available_profiles, load_profile
    from .hardware_table import profile_page, profiles_table

    if arguments.name is None:
        print(profiles_table([load_profile(name) for name in available_profiles()]))
    else:
        print(profile_page(load_profile(arguments.name)))


def _calibrate(arguments: argparse.Namespace) -> None:
    import jax

    import jaxplan

    from .hardware_table import profile_page

    if arguments.host_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.host_devices)
    profile = jaxplan.calibrate(arguments.profile, like=arguments.like, say=_say)
    _say(f"wrote {arguments.profile}")
    print(profile_page(profile))


def _models(arguments: argparse.Namespace) -> None:
    from .step_source import model_targets

    for target in model_targets():
        print(target)


def _say(text: str) -> None:
    print(f"jaxplan: {text}", file=sys.stderr)
