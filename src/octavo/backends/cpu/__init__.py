"""Native execution on the CPU."""

from octavo.backends.cpu.executor import CpuExecutable, load
from octavo.backends.cpu.lower import Lowered, lower

__all__ = ["CpuExecutable", "Lowered", "load", "lower"]
