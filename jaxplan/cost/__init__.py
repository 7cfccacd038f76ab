"""Seconds and bytes: of an operation, of a collective, of what is alive."""

from .apart import copies_apart as copies_apart
from .apart import turned_copies as turned_copies
from .collectives import collective_seconds as collective_seconds
from .collectives import collective_wire_bytes as collective_wire_bytes
from .collectives import synchronous as synchronous
from .compute import roofline_seconds as roofline_seconds
from .crossing import Traffic as Traffic
from .fills import filled_since as filled_since
from .floor import least_memory as least_memory
from .fusion import traffic as traffic
from .kinds import idle as idle
from .kinds import source_values as source_values
from .memory import MemoryProfile as MemoryProfile
from .memory import simulate_memory as simulate_memory
from .model import CostModel as CostModel
from .narrowing import narrowed as narrowed
from .parted import kernels_beside as kernels_beside
from .pooling import place_bytes as place_bytes
from .sorting import sorting_bytes as sorting_bytes
from .step_memory import step_memory as step_memory
from .tiles import device_bytes as device_bytes
from .turned import Turning as Turning
from .turned import together as together
from .turned import turned_bytes as turned_bytes
from .turned import turnings as turnings
