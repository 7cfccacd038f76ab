"""The machine at hand, measured: a hardware profile of what it achieves."""

from .calibrate import calibrate as calibrate
from .measurements import Measurements as Measurements
