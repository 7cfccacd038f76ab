"""What a step runs on: machines as data files with a source for every number, and their links as mesh
axes."""

from __future__ import annotations

from .assigned import heap_bytes as heap_bytes
from .assigned import kept_heap as kept_heap
from .library import available_profiles as available_profiles
from .library import dump_profile as dump_profile
from .library import load_profile as load_profile
from .library import profile_for_device_kind as profile_for_device_kind
from .mesh_shapes import mesh_shapes as mesh_shapes
from .profile import Link as Link
from .profile import Profile as Profile
from .targets import CompileTarget as CompileTarget
from .targets import available_targets as available_targets
from .targets import compile_for as compile_for
from .targets import compiler_options as compiler_options
from .targets import mesh_over as mesh_over
from .targets import target as target
from .topology import AxisLink as AxisLink
from .topology import axis_links as axis_links
from .topology import sums_are_whole as sums_are_whole
from .topology import three_dimensional as three_dimensional
from .xla_times import CONVOLUTION_S as CONVOLUTION_S
from .xla_times import VIEW_S as VIEW_S
from .xla_times import XlaTimes as XlaTimes
from .xla_times import xla_times as xla_times
