"""One of several cold processes that want the same keys. Every build leaves a file, so that builds can be counted.

python worker.py FOLDER MARKS START      begins when START is there
"""

import os
import sys
import time
from pathlib import Path
from typing import Final

from k3dsl.cache import Built, CompileCache, CompileKey

KEYS: Final = 50
#: Bytes of an object: a kernel of k3dsl has about as many.
OBJECT: Final = 30_000


def key_of(n: int) -> CompileKey:
    """A key like those of kernels."""
    params = {"heads": 12, "n": n, "q": 4, "page": 64, "kv": "fp8", "eps": 1e-5}
    return CompileKey("mla_value", params, "sm_90a", {"dsl": "4.8.1", "cuda": "13"}, "0" * 64)


def build_of(key: CompileKey, size: int = OBJECT) -> Built:
    """Its object: bytes that tell the key."""
    return Built((key.encoding * (size // len(key.encoding) + 1))[:size], "kernel.cubin")


def main(folder: Path, marks: Path, start: Path) -> None:
    """Wants every key."""

    def build(key: CompileKey) -> Built:
        (marks / f"{key.digest}.{os.getpid()}").touch(exist_ok=False)
        time.sleep(0.01)
        return build_of(key)

    (marks.parent / f"ready.{os.getpid()}").touch()
    while not start.exists():
        time.sleep(0.001)
    cache = CompileCache(folder)
    for n in range(KEYS):
        assert cache.get_or_build(key_of(n), build).payload == build_of(key_of(n)).payload


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
