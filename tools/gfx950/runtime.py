"""The emulator as a runtime of k3dsl's AMD launches: it takes what HIP would, and runs it on the CPU.

    runtime = EmulatorRuntime(Memory(a, b, c), model="weak", seed=1)
    ...                                   # any k3dsl object that takes runtime=
    runtime.results[-1].profiles[0]

Launches run at once, one after the other. With `collect`, they are kept for one common `run()`, each on the `device`
that was set when it was made: so kernels of several devices wait for each other.
"""

from __future__ import annotations

from typing import Any

from .codeobject import CodeObject
from .emulator import Emulator, Launch, Result
from .memory import Memory


class EmulatorRuntime:
    """One gfx950 device, or with `collect` several. Keyword options are those of the emulator's `Options`."""

    target = "gfx950"

    def __init__(self, memory: Memory | None = None, *, collect: bool = False, **options: Any) -> None:
        self.emulator = Emulator(memory, **options)
        self.memory = self.emulator.memory
        self.collect = collect
        self.device = 0
        self.in_capture = False
        self.results: list[Result] = []
        self.launches: list[Launch] = []
        self._objects: dict[bytes, CodeObject] = {}

    def load(self, payload: bytes, symbol: str) -> tuple[CodeObject, str]:
        code_object = self._objects.get(payload)
        if code_object is None:
            code_object = self._objects[payload] = CodeObject(payload)
        code_object.kernel(symbol)
        return code_object, symbol

    def unload(self, handle: Any) -> None:
        """Nothing: objects are kept with what was decoded of them."""

    def prepare(self, handle: tuple[CodeObject, str], arguments: Any) -> Any:
        return *handle, arguments

    def launch(self, prepared: Any, launch: Any, stream: int) -> None:
        code_object, symbol, arguments = prepared
        made = Launch(code_object, symbol, launch.grid, launch.block, arguments.content(), launch.lds, self.device)
        if self.collect:
            self.launches.append(made)
        else:
            self.results.append(self.emulator.run([made]))

    def run(self) -> Result:
        """Runs everything collected so far, together."""
        launches, self.launches = self.launches, []
        self.results.append(self.emulator.run(launches))
        return self.results[-1]

    def stream(self) -> int:
        return 0

    def capturing(self) -> bool:
        """What a test has set: nothing is captured here."""
        return self.in_capture

    def synchronize(self) -> None:
        """Nothing: launches are over when they return."""
