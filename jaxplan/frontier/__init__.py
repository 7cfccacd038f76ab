"""Trade-offs instead of one plan: step time against memory, and against the number of devices."""

from .counts import Curve as Curve
from .counts import DevicesPoint as DevicesPoint
from .curve import curve as curve
from .curve import min_devices as min_devices
from .frontier import frontier as frontier
from .points import Frontier as Frontier
from .points import FrontierPoint as FrontierPoint
