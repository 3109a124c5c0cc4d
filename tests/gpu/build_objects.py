"""Builds the objects that the GPU tests load. Needs the compiler and no GPU.

    python tests/gpu/build_objects.py [--jobs 2] [--only test_hopper_gpu ...]

A test module lists the kernel keys that it needs in GPU_KEYS. What is already there is not built again; what no key
asks for any more is left alone.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import harness  # noqa: E402

from k3dsl.cache import CompileCache  # noqa: E402
from k3dsl.nvidia.toolchain import Compilers, compile_key  # noqa: E402


def wanted(only: list[str]) -> list[Any]:
    """The keys of all test modules, or of those named, each once."""
    names = only or sorted(p.stem for p in HERE.glob("test_*.py"))
    keys = [key for name in names for key in getattr(import_module(name), "GPU_KEYS", ())]
    return list(dict.fromkeys(keys))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], metavar="MODULE")
    options = parser.parse_args()
    keys = wanted(options.only)
    cache = CompileCache(harness.folder())
    failed = []
    with Compilers(options.jobs) as compilers, ThreadPoolExecutor(options.jobs) as pool:
        builds = [pool.submit(cache.get_or_build, compile_key(k, harness.TARGET), compilers.build) for k in keys]
        for key, build in zip(keys, builds, strict=True):
            if build.exception() is not None:
                failed.append(key)
                print(f"{key}: {build.exception()}", file=sys.stderr)
    print(f"{len(keys)} keys, {len(failed)} failed, in {harness.folder()}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
