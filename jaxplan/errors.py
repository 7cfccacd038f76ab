"""Every exception that jaxplan raises on purpose.

Each message names the thing, the values, the rule that was broken and the way out.  All derive from
`JaxplanError`, so that a caller can catch the family; those that report a bad argument also derive from
`ValueError`.
"""

from __future__ import annotations


class JaxplanError(Exception):
    """The family of all errors raised by jaxplan."""


class TraceError(JaxplanError):
    """The step could not be read: an unsupported construct, or state that changes its shape or dtype."""


class MeshError(JaxplanError, ValueError):
    """The mesh can't be planned for: a duplicated axis, an unknown axis, devices of several kinds."""


class ConstraintError(JaxplanError, ValueError):
    """A user's constraint can't be met: it names no tensor, an unknown axis, or doesn't divide."""


class ArgumentError(JaxplanError, ValueError):
    """An argument of the planned step or of the planner itself is not of the form that was promised."""


class HardwareError(JaxplanError, ValueError):
    """A hardware profile is unknown, or its file is malformed."""


class TargetError(JaxplanError, ValueError):
    """A compile-only target is unknown, refused by its compiler, or that compiler isn't installed."""


class CompilerError(JaxplanError):
    """XLA compiles no program of a plan that was to be looked at: it has no memory for it, or fails."""


class InfeasibleError(JaxplanError):
    """No plan satisfies the constraints within the memory budget; says what is the least reachable peak."""


class SolverError(JaxplanError):
    """The solver failed in a way that is neither an answer nor a proof of infeasibility."""


class RuleError(JaxplanError, ValueError):
    """A sharding rule is inconsistent with the shapes of its operation, or is missing in strict mode."""


class PlanFileError(JaxplanError, ValueError):
    """A plan file is cut short, of a newer schema, or otherwise unreadable."""


class PlanMismatchError(JaxplanError, ValueError):
    """A plan belongs to another model or another mesh; names the leaves that differ."""
