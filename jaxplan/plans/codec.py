"""Frozen dataclasses to JSON values and back, by their type hints, so that each field is said once.

Reading is strict: a missing, an unknown and a wrong-typed field are all faults, each named by where it stands
("inputs[3].layout.dims"), and all of them are found before anything is raised.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import math
import typing
from collections.abc import Mapping
from typing import Any

_SCALARS: tuple[type, ...] = (str, int, float, bool)
_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


@functools.cache
def fields_of(cls: type) -> dict[str, Any]:
    """Field name -> type of a dataclass or a NamedTuple."""
    hints = typing.get_type_hints(cls)
    names = (
        [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else cls.__annotations__
    )
    return {name: hints[name] for name in names}


def encode(value: Any, hint: Any, skip: frozenset[str] = frozenset()) -> Any:
    """The JSON value of `value`, whose declared type is `hint`; `skip` names dataclass fields to leave out.

    Numbers become Python's own (a NumPy int would not be written), an int in a float's place a float.
    """
    if hint in _SCALARS:
        return hint(value)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        if inner[-1] is Ellipsis:
            return [encode(item, inner[0], skip) for item in value]
        return [encode(item, kind, skip) for item, kind in zip(value, inner, strict=True)]
    if origin is collections.abc.Mapping:
        return {str(key): encode(item, inner[1], skip) for key, item in value.items()}
    return {
        name: encode(getattr(value, name), kind, skip)
        for name, kind in fields_of(hint).items()
        if f"{hint.__name__}.{name}" not in skip
    }


def decode(value: Any, hint: Any, where: str, faults: list[str], skip: frozenset[str] = frozenset()) -> Any:
    """The inverse of `encode`; appends to `faults` instead of raising, and returns None for what is wrong."""
    if hint in _SCALARS:
        return _scalar(value, hint, where, faults)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        if not isinstance(value, list):
            return _fault(faults, where, "a list", value)
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) != len(value):
            return _fault(faults, where, f"a list of {len(kinds)}", value)
        items = zip(value, kinds, strict=True)
        return tuple(
            decode(item, kind, f"{where}[{i}]", faults, skip) for i, (item, kind) in enumerate(items)
        )
    if not isinstance(value, dict):
        return _fault(faults, where, "an object", value)
    if origin is collections.abc.Mapping:
        return {key: decode(item, inner[1], f"{where}.{key}", faults, skip) for key, item in value.items()}
    return _record(value, hint, where, faults, skip)


def _scalar(value: Any, hint: Any, where: str, faults: list[str]) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        return _fault(faults, where, _WORDS[hint], value)
    return value


def _record(value: Mapping[str, Any], cls: Any, where: str, faults: list[str], skip: frozenset[str]) -> Any:
    kinds = {name: kind for name, kind in fields_of(cls).items() if f"{cls.__name__}.{name}" not in skip}
    prefix = f"{where}." if where else ""
    before = len(faults)
    faults += [f"{prefix}{name}: missing" for name in kinds if name not in value]
    faults += [f"{prefix}{name}: unknown" for name in value if name not in kinds]
    read = {
        name: decode(value[name], kind, f"{prefix}{name}", faults, skip)
        for name, kind in kinds.items()
        if name in value
    }
    return cls(**read) if len(faults) == before else None


def _fault(faults: list[str], where: str, wanted: str, value: Any) -> None:
    text = repr(value)
    faults.append(f"{where}: must be {wanted}, is {text if len(text) <= 40 else text[:37] + '...'}")
