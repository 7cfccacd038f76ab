"""All the good trade-offs between step time and memory, instead of one plan for one budget."""

from .frontier import frontier as frontier
from .points import Frontier as Frontier
from .points import FrontierPoint as FrontierPoint
