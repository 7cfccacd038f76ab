"""The Plan value: what every tensor's sharding is, and everything a user can do with a plan."""

from .axis_rules import AxisRule as AxisRule
from .axis_rules import AxisRules as AxisRules
from .axis_rules import Names as Names
from .axis_rules import RuleConflict as RuleConflict
from .axis_rules import dims_by_rules as dims_by_rules
from .plan import Alternative as Alternative
from .plan import Constraint as Constraint
from .plan import Plan as Plan
from .plan import PlanCost as PlanCost
from .plan import PlannedCollective as PlannedCollective
from .plan import TensorPlan as TensorPlan
from .schedule import COMPUTE as COMPUTE
from .schedule import PlannedTask as PlannedTask
from .serialize import load_plan as load_plan
from .serialize import plan_of_text as plan_of_text
from .serialize import plan_text as plan_text
from .shardings import auto_mesh as auto_mesh
from .trees import matches as matches
