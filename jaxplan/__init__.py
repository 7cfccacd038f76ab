"""jaxplan: shards a JAX train step over a mesh by itself, and says why."""

from .api import Options as Options
from .api import ShardedStep as ShardedStep
from .api import auto_shard as auto_shard
from .api import plan as plan
from .calibration import calibrate as calibrate
from .errors import ArgumentError as ArgumentError
from .errors import CompilerError as CompilerError
from .errors import ConstraintError as ConstraintError
from .errors import HardwareError as HardwareError
from .errors import InfeasibleError as InfeasibleError
from .errors import JaxplanError as JaxplanError
from .errors import MeshError as MeshError
from .errors import PlanFileError as PlanFileError
from .errors import PlanMismatchError as PlanMismatchError
from .errors import RuleError as RuleError
from .errors import SolverError as SolverError
from .errors import TargetError as TargetError
from .errors import TraceError as TraceError
from .frontier import Curve as Curve
from .frontier import DevicesPoint as DevicesPoint
from .frontier import Frontier as Frontier
from .frontier import FrontierPoint as FrontierPoint
from .frontier import curve as curve
from .frontier import frontier as frontier
from .frontier import min_devices as min_devices
from .hardware import CompileTarget as CompileTarget
from .hardware import target as target
from .inspection import Audit as Audit
from .inspection import Comparison as Comparison
from .inspection import Export as Export
from .inspection import Verification as Verification
from .inspection import audit as audit
from .inspection import compare as compare
from .inspection import export as export
from .inspection import verify as verify
from .plans import Plan as Plan
from .plans import load_plan as load_plan
from .sharding import register_rule as register_rule
from .simulator import Timeline as Timeline
from .simulator import simulate as simulate

__version__ = "0.1.0"
