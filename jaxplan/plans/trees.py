"""The structure of a pytree as JSON, so that a plan read from a file can hand out trees again.

    leaf                       "*"
    None                       null
    tuple, list                {"tuple": [child, ...]}, {"list": [child, ...]}
    dict, str keys             {"dict": {key: child, ...}}
    dict, int keys             {"items": [[key, child], ...]}
    OrderedDict                {"ordered": [[key, child], ...]}
    namedtuple                 {"namedtuple": "module:Class", "fields": [[name, child], ...]}
    any other registered node  {"custom": "module:Class", "children": [child, ...]}

A file is never trusted with code: a namedtuple's class is looked up among the modules that are already
imported, and nothing is imported, called or unpickled.  Other registered nodes (flax.struct dataclasses,
nnx.State) carry auxiliary data that JSON can't hold; they come back when the plan is bound to arguments.
"""

from __future__ import annotations

import collections
import fnmatch
import json
import re
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

_LEAF = "*"
_SHAPES = (
    {"tuple"}, {"list"}, {"dict"}, {"items"}, {"ordered"}, {"namedtuple", "fields"}, {"custom", "children"},
)  # fmt: skip


@dataclass(frozen=True)
class Structure:
    """A tree's structure as it stands in a plan file: the JSON of this module's docstring."""

    node: Any


class UnknownNodes(Exception):
    """Node classes of a structure that can't be rebuilt in this process."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = tuple(names)


def leaf_paths(tree: Any, root: str) -> list[str]:
    """The tree path of every leaf: `leaf_paths({"w": 1}, "params") == ["params/w"]`."""
    keys = (
        jax.tree_util.keystr(key, simple=True, separator="/")
        for key, _ in jax.tree_util.tree_leaves_with_path(tree)
    )
    return [f"{root}/{key}" if key else root for key in keys]


def matches(pattern: str, path: str) -> bool:
    """Glob on tree paths: `*` stays within one part, `**` crosses parts."""
    if "**" not in pattern:
        return pattern.count("/") == path.count("/") and all(
            fnmatch.fnmatchcase(b, a) for a, b in zip(pattern.split("/"), path.split("/"), strict=True)
        )
    expression = (
        re.escape(pattern).replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
    )
    return re.fullmatch(expression.replace(r"\?", "[^/]"), path) is not None


def structure_of(tree: Any) -> Structure:
    """The structure of a treedef (or of a `Structure`: itself)."""
    return tree if isinstance(tree, Structure) else Structure(_node(tree))


def _node(treedef: Any) -> Any:
    kind_and_aux = treedef.node_data()
    if kind_and_aux is None:
        return _LEAF
    kind, aux = kind_and_aux
    children = [_node(child) for child in treedef.children()]
    if kind is type(None):
        return None
    if kind is tuple or kind is list:
        return {kind.__name__: children}
    if kind is dict and all(type(key) is str for key in aux):
        return {"dict": dict(zip(aux, children, strict=True))}
    if kind is dict and all(type(key) is int for key in aux):
        return {"items": [list(item) for item in zip(aux, children, strict=True)]}
    if kind is collections.OrderedDict and all(type(key) in (str, int) for key in aux):
        return {"ordered": [list(item) for item in zip(aux, children, strict=True)]}
    name = f"{kind.__module__}:{kind.__qualname__}"
    fields = getattr(kind, "_fields", None)
    if issubclass(kind, tuple) and aux is None and fields is not None and len(fields) == len(children):
        return {"namedtuple": name, "fields": [list(item) for item in zip(fields, children, strict=True)]}
    return {"custom": name, "children": children}


def faults_of(node: Any, where: str) -> list[str]:
    """What is wrong with the JSON of a structure: `"in_tree.dict.params: ..."`, or nothing."""
    if node is None or node == _LEAF:
        return []
    if not isinstance(node, dict) or set(node) not in _SHAPES:
        return [f"{where}: not the structure of a tree"]
    (form,) = [key for key in node if key not in ("fields", "children")]
    body = node["fields"] if form == "namedtuple" else node["children"] if form == "custom" else node[form]
    if form in ("namedtuple", "custom") and not isinstance(node[form], str):
        return [f"{where}.{form}: not the name of a class"]
    if not isinstance(body, dict if form == "dict" else list):
        return [f"{where}.{form}: must be {'an object' if form == 'dict' else 'a list'}"]
    if form in ("items", "ordered", "namedtuple"):
        keys = (str,) if form == "namedtuple" else (str, int)
        if not all(isinstance(item, list) and len(item) == 2 and type(item[0]) in keys for item in body):
            return [f"{where}.{form}: must be a list of [key, child]"]
    children = _children(node)
    return [fault for name, child in children for fault in faults_of(child, f"{where}.{name}")]


def _children(node: Any) -> list[tuple[Any, Any]]:
    """`(key, child)` in jax's leaf order."""
    if node is None or node == _LEAF:
        return []
    if "dict" in node:
        return sorted(node["dict"].items())
    if "items" in node:
        return sorted((key, child) for key, child in node["items"])
    for form in ("ordered", "fields"):
        if form in node:
            return [(key, child) for key, child in node[form]]
    return list(enumerate(node.get("children", node.get("tuple", node.get("list", [])))))


def leaf_counts(structure: Structure) -> list[tuple[Any, int]]:
    """`(key, number of leaves)` of each child of the root."""
    return [(key, count_leaves(child)) for key, child in _children(structure.node)]


def children_of(structure: Structure) -> list[Structure]:
    """The children of the root, in leaf order."""
    return [Structure(child) for _, child in _children(structure.node)]


def count_leaves(node: Any) -> int:
    """Leaves of a structure's JSON."""
    return 1 if node == _LEAF else sum(count_leaves(child) for _, child in _children(node))


def treedef_of(structure: Structure, known: Sequence[Any] = ()) -> Any:
    """The treedef of a structure.

    Args:
      known: treedefs of this process; a custom node that has the structure of one of their subtrees becomes
        it.

    Raises:
      UnknownNodes: a namedtuple's class is not imported, or a custom node has no match in `known`.
    """
    live: dict[str, Any] = {}
    if _customs(structure.node):
        for treedef in known:
            _collect(treedef, live)
    unknown: dict[str, None] = {}
    skeleton = _skeleton(structure.node, live, unknown)
    if unknown:
        raise UnknownNodes(list(unknown))
    return jax.tree.structure(skeleton)


def _customs(node: Any) -> bool:
    is_custom = isinstance(node, dict) and "custom" in node
    return is_custom or any(_customs(child) for _, child in _children(node))


def _collect(treedef: Any, live: dict[str, Any]) -> None:
    node = _node(treedef)
    if isinstance(node, dict) and "custom" in node:
        live.setdefault(_key(node), treedef)
    for child in treedef.children():
        _collect(child, live)


def _key(node: Any) -> str:
    return json.dumps(node, sort_keys=True)


def _skeleton(node: Any, live: Mapping[str, Any], unknown: dict[str, None]) -> Any:
    if node is None:
        return None
    if node == _LEAF:
        return 0
    if "custom" in node:
        treedef = live.get(_key(node))
        if treedef is not None:
            return jax.tree.unflatten(treedef, [0] * treedef.num_leaves)
        unknown[node["custom"]] = None
        return None
    children = [(key, _skeleton(child, live, unknown)) for key, child in _children(node)]
    if "namedtuple" in node:
        cls = _namedtuple(node["namedtuple"], tuple(key for key, _ in children))
        if cls is None:
            unknown[node["namedtuple"]] = None
            return None
        # past the class's own __new__, which could be anyone's code
        return tuple.__new__(cls, [child for _, child in children])
    if "ordered" in node:
        return collections.OrderedDict(children)
    if "dict" in node or "items" in node:
        return dict(children)
    values = [child for _, child in children]
    return tuple(values) if "tuple" in node else values


def _namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    """The namedtuple class of that name and those fields among the imported modules, or None."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        # by the namespace itself: getattr could run a module's __getattr__
        found = vars(found).get(part) if isinstance(found, (types.ModuleType, type)) else None
    is_class = isinstance(found, type) and issubclass(found, tuple)
    return found if is_class and getattr(found, "_fields", None) == fields else None
