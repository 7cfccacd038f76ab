"""From decided layouts to an XLA program, and the proof that it is the program that was planned."""

from .ahead import waited_values as waited_values
from .axis_orders import Key as Key
from .axis_orders import Orders as Orders
from .check import Checked as Checked
from .check import check as check
from .compiled_schedule import scheduled_seconds as scheduled_seconds
from .constrain import planned_constraints as planned_constraints
from .hlo import CompiledCollective as CompiledCollective
from .hlo import Memory as Memory
from .hlo import compiled_collectives as compiled_collectives
from .hlo import compiled_memory as compiled_memory
from .hlo import reused_parameters as reused_parameters
from .hlo_work import CompiledWork as CompiledWork
from .hlo_work import compiled_work as compiled_work
from .jit import lower_flat as lower_flat
from .jit import planned_function as planned_function
from .jit import sharding_of as sharding_of
from .order import resolve_orders as resolve_orders
from .price import Priced as Priced
from .price import price as price
from .sent import Sending as Sending
from .sent import as_sent as as_sent
from .sent import collective_prices as collective_prices
from .sent import written_seconds as written_seconds
from .yardstick import CompiledPrice as CompiledPrice
from .yardstick import compiled_price as compiled_price
