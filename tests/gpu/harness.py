"""Compiled objects for the GPU tests, and graphs: the machine with the GPU needs no compiler.

Objects come from .gpu/cache of the checkout (another folder: K3DSL_TEST_OBJECTS), filled by build_objects.py wherever
the compiler is. Without an object its test fails, with the difference to the nearest one that is there.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from k3dsl.cache import CompileCache
from k3dsl.nvidia.driver import Function, Module, driver
from k3dsl.nvidia.toolchain import compile_key

ROOT = Path(__file__).resolve().parents[2]
TARGET = "sm_90a"


def folder() -> Path:
    """Where the objects are."""
    return Path(os.environ.get("K3DSL_TEST_OBJECTS", ROOT / ".gpu" / "cache"))


@cache
def objects() -> CompileCache:
    """The cache of objects. Sealed: a key that is not there raises CacheMiss."""
    return CompileCache(folder(), frozen=True, read_only=True, allow_shared=True)


@cache
def function(key: Any) -> Function:
    """The kernel of a kernel key on the current device, loaded once."""
    entry = objects().get(compile_key(key, TARGET))
    assert entry is not None
    return Module.load(driver(), entry.payload).function(torch.cuda.current_device())


def stream() -> int:
    """Torch's current stream, as the driver takes it."""
    return torch.cuda.current_stream().cuda_stream


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """`work` run once, so that nothing is left to load, and then captured."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
