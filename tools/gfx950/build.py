"""Builds the native core once and loads it.

The compiler is the system's C++ compiler, or `zig c++` from the ziglang package. The library lies in the user's cache
under a name made from the sources, the compiler and the processor, so a change of any of them builds anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import platformdirs
from filelock import FileLock

from .errors import BuildError

SOURCES = Path(__file__).parent / "native"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-warning-option",
    "-Wno-psabi",
    "-mprefer-vector-width=512",
)

CONTRACTED = ("-ffp-contract=fast",)


def compiler() -> list[str]:
    """The C++ compiler's command: $CXX, a system compiler, or the one in ziglang."""
    if os.environ.get("CXX"):
        return os.environ["CXX"].split()
    for name in ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found:
            return [found]
    try:
        import ziglang  # noqa: F401
    except ImportError:
        raise BuildError("no C++ compiler: install one (g++, clang++) or `pip install ziglang`") from None
    return [sys.executable, "-m", "ziglang", "c++"]


def processor() -> str:
    """What `-march=native` depends on."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        flags = platform.processor()
    return f"{platform.machine()} {flags}"


def cache_folder() -> Path:
    return Path(os.environ.get("GFX950_CACHE") or Path(platformdirs.user_cache_dir("k3dsl")) / "gfx950")


def build(folder: Path | None = None) -> Path:
    """Path of the built library; builds it when it is not there."""
    command = compiler()
    files = sorted(SOURCES.glob("*.cpp"))
    headers = sorted(SOURCES.glob("*.h"))
    key = hashlib.sha256(repr((command, FLAGS, CONTRACTED, processor())).encode())
    for f in files + headers:
        key.update(f.name.encode() + f.read_bytes())
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"core-{key.hexdigest()[:24]}.so"
    with FileLock(str(folder / "build.lock")):
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            objects = [Path(temporary) / (f.stem + ".o") for f in files]

            def one(job: tuple[Path, Path]) -> None:
                extra = CONTRACTED if job[0].name == "matrix.cpp" else ()
                run([*command, *FLAGS, *extra, "-march=native", "-c", str(job[0]), "-o", str(job[1])])

            with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
                list(pool.map(one, zip(files, objects, strict=True)))
            library = Path(temporary) / "core.so"
            run([*command, "-shared", "-o", str(library), *map(str, objects)])
            os.replace(library, target)
    return target


def build_flydsl_runtime(folder: Path | None = None) -> Path:
    """The library of runtime calls for FlyDSL's launchers (flydsl_backend.py), built once like the core."""
    source = SOURCES / "flydsl" / "runtime.c"
    command = compiler()
    key = hashlib.sha256(repr(command).encode() + source.read_bytes()).hexdigest()[:24]
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"flydsl-{key}.so"
    with FileLock(str(folder / "build.lock")):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                library = Path(temporary) / "runtime.so"
                run([*command, "-x", "c", "-std=c11", "-O2", "-fPIC", "-shared", "-o", str(library), str(source)])
                os.replace(library, target)
    return target


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()}")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(build()))
    lib.gfx950_operation_name.restype = ctypes.c_char_p
    return lib


@lru_cache(maxsize=1)
def operations() -> dict[str, int]:
    """Every operation that the core implements, by name."""
    lib = library()
    return {lib.gfx950_operation_name(k).decode(): k for k in range(lib.gfx950_operation_count())}
