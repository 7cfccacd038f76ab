"""A Plan as a file: JSON that is the same byte for byte for the same plan, and made to be read in a diff.

    {
     "alternatives": {...},     one leaf a line
     "inputs": [                one leaf a line
      {"alias": "", ...},
     ...
     "schema_version": 3
    }

Keys are sorted, floats are written by `repr` (so they come back exactly), the file ends with a newline.
Fields are those of the dataclasses in `plan.py`, less `mesh` (given when the plan is loaded) and
`cost.search_s` (another one in each run); the tree structures stand as `trees.py` writes them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from ..errors import PlanFileError
from .binding import bind_mesh
from .codec import decode, encode
from .plan import Plan
from .trees import Structure, UnknownNodes, count_leaves, faults_of, structure_of, treedef_of

SCHEMA_VERSION = 3
"""Raised by one whenever the meaning of a field changes, or a field comes or goes."""

_SKIPPED = frozenset({"Plan.mesh", "Plan.in_tree", "Plan.out_tree", "PlanCost.search_s"})
_TREES = ("in_tree", "out_tree")
_TREE_WIDTH = 100
_OPENING = '{\n "'
"""How every plan file begins."""
_SHOWN = 8
"""Faults of a file that its error lists."""


def plan_text(plan: Plan) -> str:
    """The plan's file as text."""
    document = encode(plan, Plan, _SKIPPED)
    document["schema_version"] = SCHEMA_VERSION
    for which in _TREES:
        tree = getattr(plan, which)
        # `false`: this plan has no tree; null is the structure of None
        document[which] = False if tree is None else structure_of(tree).node
    entries = ",\n".join(f" {_compact(key)}: {_entry(key, document[key])}" for key in sorted(document))
    return f"{{\n{entries}\n}}\n"


def _entry(key: str, value: Any) -> str:
    """One member of the document: a list or an object takes a line for each of its items."""
    if key in _TREES:
        return _nested(value, 1)
    if isinstance(value, list) and value and key != "axes":
        return "[\n" + ",\n".join(f"  {_compact(item)}" for item in value) + "\n ]"
    if isinstance(value, dict) and value:
        return (
            "{\n"
            + ",\n".join(f"  {_compact(name)}: {_compact(value[name])}" for name in sorted(value))
            + "\n }"
        )
    return _compact(value)


def _nested(value: Any, depth: int) -> str:
    """JSON broken into lines only where one would be long: a changed leaf changes a line of its
    neighbourhood."""
    line = _compact(value)
    if len(line) + depth <= _TREE_WIDTH or not isinstance(value, (list, dict)):
        return line
    start, end = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, list):
        return f"[{start}{f',{start}'.join(_nested(item, depth + 1) for item in value)}{end}]"
    members = (f"{_compact(key)}: {_nested(value[key], depth + 1)}" for key in sorted(value))
    return f"{{{start}{f',{start}'.join(members)}{end}}}"


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part: a crash loses nothing."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def load_plan(path: str | os.PathLike[str], mesh: Mesh | AbstractMesh | None = None) -> Plan:
    """Read a plan that `Plan.save` wrote, and put it on `mesh` where one is given.

    Raises:
      PlanFileError: the file is cut short, not a plan, of a newer schema, or its fields are not as promised.
      PlanMismatchError: `mesh` has other axes than the plan.
      OSError: the file can't be read.
    """
    plan = plan_of_text(_read(path), os.fspath(path))
    return plan if mesh is None else bind_mesh(plan, mesh)


def _read(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanFileError(
            f"{os.fspath(path)}: not a plan file: byte {error.start} is not UTF-8 text. "
            "Give a file that `Plan.save` or `jaxplan plan --json` wrote"
        ) from None


def plan_of_text(text: str, path: str) -> Plan:
    """The plan of a file's text; `path` is named in errors.  Raises as `load_plan`."""
    document = _document(text, path)
    structures = {which: document.pop(which) for which in _TREES if which in document}
    faults = [f"{which}: missing" for which in _TREES if which not in structures]
    for which, node in structures.items():
        faults += [] if node is False else faults_of(node, which)
    plan = decode(document, Plan, "", faults, _SKIPPED)
    if not faults:
        faults = _inconsistencies(plan, structures)
    if faults:
        more = [f"  and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        lines = "\n".join([*(f"  {fault}" for fault in faults[:_SHOWN]), *more])
        raise PlanFileError(
            f"{path}: not a whole plan of schema {SCHEMA_VERSION}:\n{lines}\n"
            "The file was edited or damaged: plan again and save, or take it from version control"
        )
    trees = {which: _tree(node) for which, node in structures.items()}
    return dataclasses.replace(plan, **trees)


def _document(text: str, path: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        if _OPENING.startswith(text[: len(_OPENING)]) and not text.rstrip().endswith("\n}"):
            raise PlanFileError(
                f"{path}: cut short after {len(text.encode())} bytes (line {error.lineno}): the rest of the "
                "plan is "
                "missing. Copy the file again, or plan again and save; `Plan.save` never leaves a part of a "
                "file"
            ) from None
        raise PlanFileError(
            f"{path}: not a plan file: line {error.lineno}, column {error.colno} is not JSON ({error.msg}). "
            "Give a file that `Plan.save` or `jaxplan plan --json` wrote"
        ) from None
    version = document.get("schema_version") if isinstance(document, dict) else None
    if not isinstance(document, dict) or type(version) is not int:
        raise PlanFileError(
            f"{path}: JSON, but not a plan file: it has no `schema_version`. "
            "Give a file that `Plan.save` or `jaxplan plan --json` wrote"
        )
    if version > SCHEMA_VERSION:
        raise PlanFileError(
            f"{path}: written by a newer jaxplan (schema {version}; this one reads up to {SCHEMA_VERSION}): "
            "upgrade jaxplan, or plan again with this one"
        )
    if version < 1:
        raise PlanFileError(
            f"{path}: `schema_version` {version} never was; the first is 1. Plan again and save"
        )
    if version < SCHEMA_VERSION:
        raise PlanFileError(
            f"{path}: written by an older jaxplan (schema {version}; this one reads {SCHEMA_VERSION}): plan again and "
            "save"
        )
    del document["schema_version"]
    return document


def _inconsistencies(plan: Plan, structures: dict[str, Any]) -> list[str]:
    """Fields that are each well-formed and together are not a plan."""
    names = {name for name, _ in plan.axes}
    faults = []
    for which, tensors in (("inputs", plan.inputs), ("outputs", plan.outputs)):
        for tensor in tensors:
            used = {name for dim in tensor.layout.dims for name in dim} | set(tensor.layout.unreduced)
            if len(tensor.layout.dims) != len(tensor.shape):
                faults.append(
                    f"{which}: {tensor.path} has {len(tensor.shape)} dimensions, its layout "
                    f"{len(tensor.layout.dims)}"
                )
            faults += [
                f"{which}: {tensor.path} is cut over {name!r}, no axis of the mesh"
                for name in sorted(used - names)
            ]
    for which, tensors in (("in_tree", plan.inputs), ("out_tree", plan.outputs)):
        leaves = None if structures[which] is False else count_leaves(structures[which])
        if leaves not in (None, len(tensors)):
            faults.append(f"{which}: has {leaves} leaves, and the plan lists {len(tensors)} tensors")
    return faults


def _tree(node: Any) -> Any:
    """The treedef where this process can build it now, else the structure, which binding completes."""
    if node is False:
        return None
    structure = Structure(node)
    try:
        return treedef_of(structure)
    except UnknownNodes:
        return structure
