"""An emulator that executes gfx950 (AMD MI355X) code objects on the CPU.

from tools.gfx950 import Emulator, Memory
Emulator(Memory(a, b, c)).launch("kernel.hsaco", "vadd", grid=4, block=256, args=[a, b, c, 1000])
"""

from .codeobject import CodeObject, Kernel
from .emulator import Emulator, Launch, Options, Report, Result, Trace
from .errors import BuildError, CodeObjectError, EmulatorError, ExecutionError, UnsupportedInstructionError
from .memory import Memory, Region
from .profile import Profile

__all__ = [
    "BuildError",
    "CodeObject",
    "CodeObjectError",
    "Emulator",
    "EmulatorError",
    "ExecutionError",
    "Kernel",
    "Launch",
    "Memory",
    "Options",
    "Profile",
    "Region",
    "Report",
    "Result",
    "Trace",
    "UnsupportedInstructionError",
]
