"""What users call, and what those who check plans need of the planner."""

from __future__ import annotations

from .arguments import shape_of as shape_of
from .autoshard import ShardedStep as ShardedStep
from .autoshard import auto_shard as auto_shard
from .autoshard import budget_of as budget_of
from .autoshard import plan as plan
from .candidates import Found as Found
from .candidates import Pipeline as Pipeline
from .meshes import Target as Target
from .meshes import target_of as target_of
from .options import Options as Options
from .options import as_options as as_options
from .pins import pins_of as pins_of
from .pins import stated_orders as stated_orders
from .planner import make_plan as make_plan
from .planner import model_of as model_of
from .planner import speaker as speaker
from .reporting import finished_plan as finished_plan
from .templates import input_kinds as input_kinds
