"""What was compiled, or written by hand, laid beside what the planner promises."""

from __future__ import annotations

from .audit import Audit as Audit
from .audit import Change as Change
from .audit import Side as Side
from .audit import audit as audit
from .compare import Tolerances as Tolerances
from .export import Export as Export
from .export import export as export
from .findings import Finding as Finding
from .findings import Quantity as Quantity
from .findings import Verification as Verification
from .rivals import Comparison as Comparison
from .rivals import Rival as Rival
from .rivals import compare as compare
from .rivals import compare_on as compare_on
from .verify import verify as verify
