"""Everything that the emulator raises on purpose."""

from __future__ import annotations


class EmulatorError(Exception):
    """Base of all errors of the emulator."""


class CodeObjectError(EmulatorError, ValueError):
    """The file is not a gfx950 code object, or asks for something that the machine does not have."""


class UnsupportedInstructionError(EmulatorError, NotImplementedError):
    """The program holds an instruction that the emulator does not implement."""


class BuildError(EmulatorError, RuntimeError):
    """The native core could not be built."""


class ExecutionError(EmulatorError, RuntimeError):
    """Execution stopped. `kind` says why: 'out of bounds', 'misaligned', 'missing wait', 'unsupported', 'deadlock',
    'budget' or 'trap'; the message says where and shows the code around it."""

    def __init__(self, kind: str, message: str, pc: int = -1, wave: int = -1, lane: int = -1, address: int = 0) -> None:
        super().__init__(message)
        self.kind, self.pc, self.wave, self.lane, self.address = kind, pc, wave, lane, address
