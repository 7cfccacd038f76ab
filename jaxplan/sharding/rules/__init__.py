"""The factor rules of JAX's primitives: one decorated function for each, a family a file.

A rule is bold only where the partitioner keeps up: every strategy that it admits is compiled in
tests/sharding and must need no collective but those of its reduction factors.  Where backends differ the TPU
compiler decides; what the CPU backend gathers besides (top_k, grouped convolutions) is named there.
"""

from . import collective as _collective
from . import contraction as _contraction
from . import control_flow as _control_flow
from . import elementwise as _elementwise
from . import indexing as _indexing
from . import linalg as _linalg
from . import random as _random
from . import reduction as _reduction
from . import shape as _shape
from . import slices as _slices
from .elementwise import ELEMENTWISE as ELEMENTWISE
from .registry import Ring as Ring
from .registry import RuleFunction as RuleFunction
from .registry import cut_locally as cut_locally
from .registry import is_cut_locally as is_cut_locally
from .registry import local_function as local_function
from .registry import named_unknown as named_unknown
from .registry import register_rule as register_rule
from .registry import registered as registered
from .registry import rule_for as rule_for
from .registry import runs_locally as runs_locally
from .registry import sums_locally as sums_locally

FAMILIES = (
    _collective,
    _contraction,
    _control_flow,
    _elementwise,
    _indexing,
    _linalg,
    _random,
    _reduction,
    _shape,
    _slices,
)
"""The modules whose import filled the table."""
