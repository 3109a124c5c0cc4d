"""FlyDSL's `emulator` backend: kernels launched through FlyDSL's ordinary Python API run on the emulator.

    from tools.gfx950 import flydsl_backend
    flydsl_backend.install()              # before the first FlyDSL compile of the process
    with flydsl_backend.emulating(Memory(a, b, c)) as session:
        vadd(a, b, c, n)                  # CPU tensors are the memory; errors are raised here
    session.results[0].profiles[0]

The names of FlyDSL that are not promised to stay are used in this file only; they were seen in version 0.5.0.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .build import build_flydsl_runtime
from .codeobject import CodeObject
from .emulator import Emulator, Launch, Result
from .memory import Memory
from .toolkit import toolkit

SEEN_VERSION = "0.5.0"
CALLBACK = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_uint64,
)


@dataclass
class Session:
    """One stretch of emulated launches. With `collect`, launches are kept for one common run (several devices)."""

    emulator: Emulator
    collect: bool = False
    device: int = 0
    results: list[Result] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    failure: BaseException | None = None

    def take(self, launch: Launch) -> None:
        self.launches.append(launch)
        if not self.collect:
            self.results.append(self.emulator.run([launch]))

    def run(self) -> Result:
        """Runs everything collected so far, together."""
        launches, self.launches = self.launches, []
        self.results.append(self.emulator.run(launches))
        return self.results[-1]


class _Hooks:
    """What must live as long as the process once installed."""

    installed = False
    library: ctypes.CDLL
    callback: Any
    session: Session | None = None
    objects: ClassVar[dict[bytes, CodeObject]] = {}


def _on_launch(blob: int, size: int, name: bytes, dims: Any, dynamic_lds: int, parameters: Any, count: int) -> None:
    session = _Hooks.session
    if session is None:
        return
    try:
        data = ctypes.string_at(blob, size)
        code_object = (
            _Hooks.objects.setdefault(data, CodeObject(data)) if data not in _Hooks.objects else _Hooks.objects[data]
        )
        kernel = code_object.kernel(name.decode())
        explicit = [a for a in kernel.arguments if not a.hidden]
        args = [ctypes.string_at(parameters[k], a.size) for k, a in enumerate(explicit)]
        grid, block = tuple(dims[0:3]), tuple(dims[3:6])
        session.take(Launch(code_object, kernel.name, grid, block, args, dynamic_lds, session.device))
    except BaseException as error:  # a C frame is above: raised by the wrapper of the launcher
        session.failure = error


def install() -> None:
    """Registers the backend and selects it. Needs no GPU, no driver and no ROCm."""
    if _Hooks.installed:
        return
    import flydsl
    from flydsl.compiler import jit_executor
    from flydsl.compiler.backends import register_backend
    from flydsl.compiler.backends.base import GPUTarget
    from flydsl.compiler.backends.rocm import RocmBackend
    from flydsl.runtime.device_runtime import register_compile_runtime_mapping

    version = getattr(flydsl, "__version__", SEEN_VERSION)
    if not version.startswith(SEEN_VERSION):
        raise ImportError(f"the emulator backend was written for flydsl {SEEN_VERSION}, this is {version}")
    runtime, root = str(build_flydsl_runtime()), str(toolkit())

    class EmulatorBackend(RocmBackend):
        @staticmethod
        def detect_target() -> GPUTarget:
            return GPUTarget("rocm", "gfx950", 64)

        def _pipeline_parts(self, *, compile_hints: dict[str, Any]) -> tuple[list[str], str]:
            before, binary = super()._pipeline_parts(compile_hints=compile_hints)
            return before, binary.replace("format=fatbin", f'format=fatbin toolkit="{root}"')

        def toolkit_fingerprint(self) -> str:
            return "gfx950-emulator"

        def jit_runtime_lib_basenames(self) -> list[str]:
            return [runtime, "libmlir_c_runner_utils.so"]

    register_backend("emulator", EmulatorBackend)
    register_compile_runtime_mapping("emulator", "rocm")
    os.environ |= {"FLYDSL_COMPILE_BACKEND": "emulator", "FLYDSL_GPU_ARCH": "gfx950", "ARCH": "gfx950"}
    _Hooks.library = ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    _Hooks.callback = CALLBACK(_on_launch)
    _Hooks.library.gfx950_set_launch_callback(_Hooks.callback)

    plain = jit_executor.CompiledArtifact._get_func_exe

    def raising(self: Any) -> Any:
        launcher = plain(self)

        def call(packed: Any) -> Any:
            done = launcher(packed)
            session = _Hooks.session
            if session and session.failure:
                failure, session.failure = session.failure, None
                raise failure
            return done

        return call

    jit_executor.CompiledArtifact._get_func_exe = raising
    _Hooks.installed = True


@contextmanager
def emulating(memory: Memory | None = None, *, collect: bool = False, **options: Any) -> Iterator[Session]:
    """Launches inside the block run over `memory` (by default: any address of the process, unchecked)."""
    install()
    before = _Hooks.session
    _Hooks.session = Session(Emulator(memory, **options), collect)
    try:
        yield _Hooks.session
    finally:
        _Hooks.session = before
