"""The files of curves and frontiers: JSON objects with the number of their schema."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import PlanFileError

SCHEMA_VERSION = 4


def write_document(path: str | os.PathLike[str], document: dict[str, Any]) -> None:
    """Write a document: the same bytes for the same values."""
    text = json.dumps({**document, "schema_version": SCHEMA_VERSION}, indent=1, sort_keys=True)
    Path(path).write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def reading(path: str | os.PathLike[str], kind: str) -> Iterator[dict[str, Any]]:
    """The document in a file, to be taken apart inside: whatever is wrong with it there is told as the file's fault.

    Raises:
      PlanFileError: the file is no `kind` (a curve, a frontier), or of another schema.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if document.pop("schema_version") != SCHEMA_VERSION:
            raise PlanFileError(
                f"{os.fspath(path)}: a {kind} of another schema than {SCHEMA_VERSION}: make it again"
            )
        yield document
    except PlanFileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanFileError(
            f"{os.fspath(path)}: not a {kind} that `{kind.capitalize()}.to_json` wrote: {error!r}"
        ) from error
