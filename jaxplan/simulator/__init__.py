"""The execution simulator: a plan's timeline, and what changes of it do."""

from .engine import Load as Load
from .engine import Net as Net
from .engine import Response as Response
from .engine import Run as Run
from .engine import respond as respond
from .strategies import Between as Between
from .strategies import Change as Change
from .strategies import Choices as Choices
from .strategies import Schedule as Schedule
from .strategies import StrategySimulator as StrategySimulator
from .timeline import Event as Event
from .timeline import Timeline as Timeline
from .timeline import simulate as simulate
