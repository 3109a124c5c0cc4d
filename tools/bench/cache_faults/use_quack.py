"""One process that wants one kernel from quack's cache: a real CuTe DSL host function. Prints what came of it as JSON.

python use_quack.py FOLDER [--change version|flavour] [--slow SECONDS]
"""

import argparse
import json
import os
import sys
import time
import warnings

warnings.simplefilter("ignore")
parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--change", choices=("version", "flavour"))
parser.add_argument("--slow", type=float, default=0.0)
given = parser.parse_args()
os.environ["QUACK_CACHE_DIR"] = given.folder

import cutlass  # noqa: E402
import torch  # noqa: E402
from cutlass import Int32, cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402
from quack.cache import jit_cache  # noqa: E402

builds: list[int] = []
if given.change == "version":
    cutlass.__version__ = "99.0"
# flavour: libs-cu12 in the place of libs-cu13 have the same version number, and nothing else of them is looked at.


@jit_cache
def compile_fill(start: int):  # type: ignore[no-untyped-def]
    builds.append(start)
    time.sleep(given.slow)

    @cute.jit
    def fill(t: cute.Tensor):  # type: ignore[no-untyped-def]
        for i in range(64):
            t[i] = Int32(i * 7 + start)

    return cute.compile(
        fill, from_dlpack(torch.zeros(64, dtype=torch.int32), enable_tvm_ffi=True), options="--enable-tvm-ffi"
    )


filled = torch.zeros(64, dtype=torch.int32)
compile_fill(5)(filled)
good = filled.tolist() == [i * 7 + 5 for i in range(64)]
sys.stdout.write(json.dumps({"builds": len(builds), "good": good, "bad": "computes a wrong result"}) + "\n")
