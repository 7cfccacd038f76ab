"""What users call."""

from .autoshard import ShardedStep as ShardedStep
from .autoshard import auto_shard as auto_shard
from .autoshard import plan as plan
from .options import Options as Options
