"""A plan as Python that needs jax alone: the mesh, a PartitionSpec for every path, and trees of shardings
from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..sharding import Layout
from .binding import argument_roots
from .columns import percent
from .explain import local_shape
from .plan import Constraint, Plan, TensorPlan
from .table import mesh_text
from .trees import children_of, structure_of

_HELPER = '''

def _shardings(mesh, specs, root, tree):
    """A NamedSharding for each leaf of `tree`, looked up by its path under `root`."""

    def sharding(key, leaf):
        inner = jax.tree_util.keystr(key, simple=True, separator="/")
        return NamedSharding(mesh, specs[f"{root}/{inner}" if inner else root])

    return jax.tree_util.tree_map_with_path(sharding, tree)
'''


def python_source(plan: Plan) -> str:
    """The text of `Plan.to_python`: a module with `make_mesh`, `SPECS`, `in_shardings` and
    `out_shardings`."""
    positional = argument_roots(plan)
    roots = list(dict.fromkeys([*positional, *(tensor.path.split("/")[0] for tensor in plan.inputs)]))
    keywords = roots[len(positional) :]
    parameters = ", ".join(["mesh", *positional, *(["*", *keywords] if keywords else [])])
    result = "result"
    parts = [
        _header(plan, positional, keywords),
        _make_mesh(plan),
        _specs("SPECS", "every argument leaf", plan, plan.inputs),
        _specs("RESULT_SPECS", "every result leaf", plan, plan.outputs),
        _HELPER,
        _function("in_shardings", parameters, "the positional arguments", _tuple("SPECS", positional)),
    ]
    if keywords:
        value = ", ".join(f"{name!r}: {_call('SPECS', name)}" for name in keywords)
        parts.append(
            _function("kwarg_shardings", parameters, "the keyword arguments, by name", f"{{{value}}}")
        )
    parts.append(
        _function(
            "out_shardings",
            f"mesh, {result}",
            "the result (of jax.eval_shape)",
            _call("RESULT_SPECS", result),
        )
    )
    parts.append(_constraints(plan.constraints))
    return "".join(parts)


def _header(plan: Plan, positional: Sequence[str], keywords: Sequence[str]) -> str:
    arguments = ", ".join([*positional, *(f"{name}={name}" for name in keywords)])
    given = ", ".join(["mesh", *positional, *(f"{name}={name}" for name in keywords)])
    comment = [
        f"Shardings of `{plan.name}` on mesh {mesh_text(plan)}, planned by jaxplan for {plan.hardware}.",
        f"Predicted peak: {percent(plan.cost.peak_bytes / plan.budget_bytes)} of the memory budget.",
        "",
        "    mesh = make_mesh()",
    ]
    modules = _modules(plan, positional)
    if modules:  # what `nnx.jit` runs stays where it lies
        states = ", ".join(["mesh", *(f"nnx.state({name})" if name in modules else name for name in positional)])
        comment += [
            f"    planned = in_shardings({states})",
            *(
                f"    nnx.update({name}, jax.device_put(nnx.state({name}), planned[{positional.index(name)}]))"
                for name in modules
            ),
            f"    step = nnx.jit({plan.name})",
        ]
    else:
        comment += [
            "    step = jax.jit(",
            f"        {plan.name},",
            f"        in_shardings=in_shardings({given}),",
            f"        out_shardings=out_shardings(mesh, jax.eval_shape({plan.name}, {arguments})),",
            "    )",
        ]
    lines = "\n".join(comment).replace("\\", "\\\\").replace('"""', "'''")
    return (
        f'"""{lines}\n"""\n\nimport jax\nfrom jax.sharding import AxisType, NamedSharding\n'
        "from jax.sharding import PartitionSpec as P\n"
    )


def _modules(plan: Plan, positional: Sequence[str]) -> list[str]:
    """The positional arguments that are NNX modules, of whose states the plan speaks."""
    if plan.in_tree is None:
        return []
    arguments = children_of(children_of(structure_of(plan.in_tree))[0])
    return [
        name
        for name, argument in zip(positional, arguments, strict=False)
        if isinstance(argument.node, dict) and argument.node.get("custom", "").endswith(":ModuleState")
    ]


def _make_mesh(plan: Plan) -> str:
    sizes = tuple(size for _, size in plan.axes)
    names = tuple(name for name, _ in plan.axes)
    return f'''

def make_mesh():
    """The plan's mesh, of Auto axes; one of your own keeps these names and sizes in this order."""
    sizes, names = {sizes!r}, {names!r}
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
'''


def _specs(name: str, what: str, plan: Plan, tensors: Sequence[TensorPlan]) -> str:
    lines = [
        f"    {tensor.path!r}: {_spec(tensor)},  # {_shape(tensor.shape)} {tensor.dtype}, "
        f"{_shape(local_shape(tensor, plan))} on a device"
        for tensor in tensors
    ]
    return "\n".join(
        ["", "", f"# The PartitionSpec of {what}, by tree path.", f"{name} = {{", *lines, "}", ""]
    )


def _spec(tensor: TensorPlan) -> str:
    return f"P({_parts(tensor.layout)})"


def _parts(layout: Layout) -> str:
    return ", ".join(map(repr, layout.spec()))


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _call(specs: str, root: str) -> str:
    return f"_shardings(mesh, {specs}, {root!r}, {root})"


def _tuple(specs: str, roots: Sequence[str]) -> str:
    calls = [_call(specs, root) for root in roots]
    return f"({', '.join(calls)}{',' * (len(calls) == 1)})"


def _function(name: str, parameters: str, what: str, value: str) -> str:
    return f'''

def {name}({parameters}):
    """Trees of NamedSharding in the structure of {what}: arrays or ShapeDtypeStructs."""
    return {value}
'''


def _constraints(constraints: Sequence[Constraint]) -> str:
    constraints = [one for one in constraints if one.is_pin]
    if not constraints:
        return ""
    # layers and leaves that are alike say the same, hundreds of times in an unrolled program
    alike = Counter(
        (
            one.why == "propagation",
            f"{one.source}, {one.primitive} {_shape(one.shape)}: P({_parts(one.layout)}), for {one.why}",
        )
        for one in constraints
    )
    lines = [
        "# Inside the step the plan also pins these values, as often as is said; write them where they are made, as",
        "# jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec)):",
    ]
    for key in sorted(alike, key=lambda key: key[0]):  # what communication is made of first
        lines.append(f"#   {key[1]}" + (f" ({alike[key]} times)" if alike[key] > 1 else ""))
    return "\n".join(["", "", *lines, ""]).replace("\r", " ")
