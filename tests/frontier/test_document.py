"""Files that are no curve and no frontier are refused by name, with what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxplan.errors import PlanFileError
from jaxplan.frontier.counts import Curve
from jaxplan.frontier.points import Frontier


@pytest.mark.parametrize("kind", [Curve, Frontier])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "not a .* wrote"),
        ("[1]", "not a .* wrote"),
        ("no json", "not a .* wrote"),
        ('{"schema_version": 4, "points": [[1]]}', "not a .* wrote"),
        ('{"schema_version": 99, "points": []}', "of another schema than 4: make it again$"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    kind: type[Curve] | type[Frontier], text: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(PlanFileError, match=rf"^[^:]*bad\.json: .*{said}"):
        kind.from_json(tmp_path / "bad.json")
