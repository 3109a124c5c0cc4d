"""One process that wants one kernel from our cache. Prints what came of it as JSON.

python use_ours.py FOLDER [--change version|flavour] [--slow SECONDS]
"""

import argparse
import hashlib
import json
import time

from k3dsl.cache import Built, CompileCache, CompileKey

SIZE = 30_000


def payload(key: CompileKey) -> bytes:
    """The kernel of a key: bytes that tell it."""
    seed = hashlib.sha256(key.encoding).digest()
    return (seed * (SIZE // len(seed) + 1))[:SIZE]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--change", choices=("version", "flavour"))
    parser.add_argument("--slow", type=float, default=0.0)
    given = parser.parse_args()
    toolchain = {"dsl": "4.8.1", "cuda": "13"}
    toolchain |= {"version": {"dsl": "4.8.2"}, "flavour": {"cuda": "12"}, None: {}}[given.change]
    key = CompileKey("mla_value", {"heads": 12}, "sm_90a", toolchain, "0" * 64)
    builds = []

    def build(key: CompileKey) -> Built:
        builds.append(key)
        time.sleep(given.slow)
        return Built(payload(key), "kernel.cubin")

    entry = CompileCache(given.folder).get_or_build(key, build)
    print(
        json.dumps({"builds": len(builds), "good": entry.payload == payload(key), "bad": "hands out a damaged object"})
    )


main()
