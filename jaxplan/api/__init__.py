"""What users call, and what those who check plans need of the planner."""

from __future__ import annotations

from .arguments import shape_of as shape_of
from .autoshard import ShardedStep as ShardedStep
from .autoshard import auto_shard as auto_shard
from .autoshard import budget_of as budget_of
from .autoshard import plan as plan
from .meshes import Target as Target
from .meshes import target_of as target_of
from .options import Options as Options
from .options import as_options as as_options
from .planner import make_plan as make_plan
from .planner import model_of as model_of
from .templates import input_kinds as input_kinds
