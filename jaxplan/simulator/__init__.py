"""The execution simulator: a plan's timeline, and what changes of it do."""

from .engine import Load as Load
from .engine import Net as Net
from .engine import Response as Response
from .engine import Run as Run
from .engine import respond as respond
from .timeline import Event as Event
from .timeline import Timeline as Timeline
from .timeline import simulate as simulate
