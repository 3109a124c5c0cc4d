"""A fake driver for libraries of several kernels, and layers on a fake Blackwell."""

from pathlib import Path
from typing import Any

import torch
from fake_cuda import FakeCuda, FakeDriver, _elf_at, fake_build
from fake_runtime import Bench

from k3dsl import CompileCache, Deployment
from k3dsl.nvidia import device as devices
from k3dsl.nvidia.cubin import Cubin, parse_all
from k3dsl.nvidia.driver import Driver
from k3dsl.nvidia.runtime import Executables, Runtime

CAPABILITY = {"sm_100a": (10, 0), "sm_103a": (10, 3)}


class BlackwellCuda(FakeCuda):
    """A FakeCuda whose libraries may hold more than one kernel."""

    def _cuLibraryLoadData(self, out: Any, code: int, *_: Any) -> int:  # noqa: N802
        try:
            kernels = parse_all(_elf_at(code))
        except Exception:
            return 200  # CUDA_ERROR_INVALID_IMAGE
        if {k.arch for k in kernels} != {f"sm_{self.attributes[75]}{self.attributes[76]}a"}:
            return 209  # CUDA_ERROR_NO_BINARY_FOR_GPU
        out[0] = handle = self._handle()
        self.loaded[handle] = kernels[0]
        self.libraries = {**getattr(self, "libraries", {}), handle: {k.symbol: k for k in kernels}}
        return 0

    def _cuLibraryGetKernel(self, out: Any, library: int, symbol: bytes) -> int:  # noqa: N802
        kernels: dict[str, Cubin] = self.libraries[library]
        if symbol.decode() not in kernels:
            return 500  # CUDA_ERROR_NOT_FOUND
        out[0] = handle = self._handle()
        self._kernels[handle] = kernels[symbol.decode()]
        return 0


class BlackwellDriver(FakeDriver):
    """A FakeDriver of one Blackwell GPU."""

    def __init__(self, target: str = "sm_100a", sm_count: int = 148, **facts: Any) -> None:
        self.cuda = BlackwellCuda(capability=CAPABILITY[target], sm_count=sm_count, **facts)
        Driver.__init__(self, self.cuda)


class BlackwellBench(Bench):
    """A Bench on a fake Blackwell. `cache` has the objects with host code, which are real; all others are empty."""

    def __init__(self, plan: Deployment, cache: CompileCache, sm_count: int = 148) -> None:
        self.plan, self.cache = plan, cache
        self.fake = BlackwellDriver(str(plan.target), sm_count)
        self.stream, self.synchronized = 0x57, 0
        for key in plan.keys():  # noqa: SIM118 - a method, not a dict's
            if key.kernel != "mla_tokenspeed":
                cache.get_or_build(key, fake_build)
        self.executables = Executables(self.fake)
        self.runtime = Runtime(
            self.executables,
            devices.read(0, self.fake),
            torch.device("cpu"),
            lambda: self.stream,
            self._synchronize,
        )


def cache_in(folder: Path) -> CompileCache:
    """A cache of a test session."""
    return CompileCache(folder)
