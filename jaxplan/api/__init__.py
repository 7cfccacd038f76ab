"""What users call, and what those who check plans need of the planner."""

from __future__ import annotations

from .autoshard import ShardedStep as ShardedStep
from .autoshard import auto_shard as auto_shard
from .autoshard import budget_of as budget_of
from .autoshard import plan as plan
from .candidates import Pipeline as Pipeline
from .devices import AUTO as AUTO
from .devices import Devices as Devices
from .devices import devices_of as devices_of
from .found import Found as Found
from .kinds import input_kinds as input_kinds
from .mesh_search import NEAR_BUDGET as NEAR_BUDGET
from .mesh_search import MeshSearch as MeshSearch
from .mesh_search import MeshTrial as MeshTrial
from .mesh_search import best_plan as best_plan
from .meshes import Target as Target
from .meshes import model_of as model_of
from .meshes import target_of as target_of
from .modules import of_arrays as of_arrays
from .options import Options as Options
from .options import as_options as as_options
from .options import speaker as speaker
from .planner import make_plan as make_plan
from .planner import plan_prepared as plan_prepared
from .prepare import StepOfShapes as StepOfShapes
from .prepare import prepared as prepared
from .prepare import step_of_shapes as step_of_shapes
from .reporting import finished_plan as finished_plan
from .simulating import simulated_choices as simulated_choices
